"""The layer for multi-token prediction (MTP) in a model's own files, read as a head for it: as
DeepSeek-V3 and GLM-4.5 name it, and as MiMo does, which joins state and embedding the other way
round (DeepSeek-AI 2024, DeepSeek-V3, section 2.2). Qwen 3.5's stands in `qwen35.py`.

Layers with experts or with DeepSeek's latent attention are refused by the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from edge_spec.core.heads import EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.families.tensors import raised
from edge_spec.exporters.heads.eagle import head_config, require_target, with_weights
from edge_spec.exporters.heads.eagle_tensors import our_name, published_name, require_shapes
from edge_spec.exporters.heads.head_files import HeadFiles
from edge_spec.exporters.heads.stored_tensors import StoredTensors
from edge_spec.exporters.mtp_layers import MIMO_PREFIX, mtp_prefix
from edge_spec.exporters.stored_tensor import StoredTensor

_LAYER = "layers.0."
_QUERIES, _GATE = _LAYER + "q.weight", _LAYER + "q_gate.weight"


@dataclass(frozen=True)
class MtpForm:
    """Describes how files have such a layer.

    prefix: of its tensors. names: theirs -> ours, of those that other heads have not, or name in
    another way."""

    prefix: str
    names: Mapping[str, str]
    in_layer: str = _LAYER  # what the names of a layer's own tensors lack
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # how names end that say nothing
    is_state_first: bool = False  # what fc joins: the state, then the embedding
    norm_offset: float = 0.0  # what is added to norms
    is_gated: bool = False  # in the rows of each head of queries follow those of its gate

    def ours(self, name: str) -> str | None:
        own = name.removeprefix(self.prefix)
        return self.names.get(own) or our_name(self.in_layer + own)

    def theirs(self, name: str) -> str:
        """Returns what files call a tensor of ours, for messages."""
        named = next((theirs for theirs, ours in self.names.items() if ours == name), None)
        return self.prefix + (named or published_name(name).removeprefix(self.in_layer))


_DEEPSEEK = MappingProxyType(
    {
        "enorm.weight": "embed_norm",
        "hnorm.weight": "state_norm",
        "eh_proj.weight": "fc.weight",
        "embed_tokens.weight": "embed",
        "shared_head.norm.weight": "norm",
        "shared_head.head.weight": "head",
    }
)
_MIMO = MappingProxyType(
    {
        "token_layernorm.weight": "embed_norm",
        "hidden_layernorm.weight": "state_norm",
        "input_proj.weight": "fc.weight",
        "final_layernorm.weight": "norm",
    }
)


class _StateFirst(StoredTensors):
    """Tensors of which fc joins the state and then the embedding: its halves change places."""

    def __getitem__(self, name: str) -> np.ndarray:
        found = super().__getitem__(name)
        return np.roll(found, found.shape[1] // 2, axis=1) if name == "fc.weight" else found


def mtp_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    prefix = mtp_prefix(files.values, files.tensors)
    if prefix is None:
        raise ModelFileError(
            f"{files.path} states layers for multi-token prediction, and has none",
            remedy="Download the model again, or use it without them.",
        )
    is_mimo = prefix == MIMO_PREFIX
    form = MtpForm(prefix, _MIMO if is_mimo else _DEEPSEEK, is_state_first=is_mimo)
    return head_of_form(files, form)


def head_of_form(files: HeadFiles, form: MtpForm) -> EagleHead:
    """Raises as `open_head` does."""
    path, values, target = files.path, files.values, files.target
    named = _named(path, files.tensors, form)
    head = EagleHead(
        kind="MTP",
        path=path,
        config=head_config(path, values, named, target, "mtp"),
        feature_layers=(target.num_layers,),
        feature_size=target.hidden_size,
        tensors={},
        joins_embedding=True,
        norms_inputs=True,
        returns_normed=True,
    )
    require_target(head, named, values, target)
    num_layers = values.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers != target.num_layers:
        raise UsageError(
            f"{path} has the layer for multi-token prediction of another target: its model has "
            f"{num_layers} layers, this target {target.num_layers}",
            remedy="Use it with its own model.",
        )
    if form.is_gated:
        named |= _with_gates(head, named, form)
    require_shapes(head, named, target.vocab_size, frozenset(), form.theirs)
    if not files.has_weights:
        return head
    norms = (name for name in named if name.endswith("norm") and form.norm_offset)
    named |= {name: raised(named[name], form.norm_offset) for name in norms}
    read = with_weights(head, named)
    return replace(read, tensors=_StateFirst(named)) if form.is_state_first else read


def _named(
    path: Path, tensors: Mapping[str, StoredTensor], form: MtpForm
) -> dict[str, StoredTensor]:
    """Raises UnsupportedModelError for a tensor that is not computed."""
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(form.prefix) or name.endswith(form.ignored):
            continue
        ours = form.ours(name)
        if ours is None:
            raise UnsupportedModelError(
                f"{path} has {name[:200]} in its layer for multi-token prediction, which is not "
                "computed",
                remedy="Use the model without --draft.",
            )
        if ours.startswith(_LAYER) or not ours.startswith("layers."):  # of several, the first
            named[ours] = tensor
    return named


def _with_gates(
    head: EagleHead, named: Mapping[str, StoredTensor], form: MtpForm
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields queries and their gates apart. Raises ModelFileError for a matrix of another shape."""
    config, stored = head.config, named.get(_QUERIES)
    expected = (2 * config.query_size, config.hidden_size)
    if stored is None or stored.shape != expected:
        found = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
        raise ModelFileError(
            f"{head.path}: tensor {form.theirs(_QUERIES)} {found}, expected {list(expected)}",
            remedy="Download the head again, or use it with its own target.",
        )
    rows = np.arange(expected[0]).reshape(config.num_heads, 2, config.head_dim)
    for name, order in ((_QUERIES, rows[:, 0].ravel()), (_GATE, rows[:, 1].ravel())):
        yield name, _picked(stored, order)


def _picked(stored: StoredTensor, order: np.ndarray) -> StoredTensor:
    """Some rows of a matrix, which stay in their file until they are asked for."""
    return replace(
        stored,
        shape=(len(order), *stored.shape[1:]),
        read_rows=lambda rows: stored.rows(order[rows]).data,
    )
