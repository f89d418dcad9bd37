"""The layer for multi-token prediction (MTP) in a model's own files, read as a head for it: as
DeepSeek-V3 and GLM-4.5 name it, and as MiMo does, which joins state and embedding the other way
round (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

Qwen 3.5's is `mtp.*` of a model's directory, and what llama.cpp's converter makes of it, the block
after the model's own in a GGUF file. It is one of the model's layers that attend, with gates beside
the queries, and reads the state after the model's final norm. Norms of a directory have 1 taken
away, those of GGUF have not.

Layers with DeepSeek's experts or its latent attention are refused by the names of their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, HeadExperts
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.families.family import raised
from edge_spec.exporters.gguf_reader import GgufFile, Metadata, first_architecture
from edge_spec.exporters.heads.eagle import head_config, require_target, with_weights
from edge_spec.exporters.heads.head_files import (
    GGUF_SIZES,
    HeadFiles,
    StoredTensors,
    count,
    each_expert,
    mapping,
    our_name,
    published_name,
    require_shape,
    require_shapes,
    stated_in_gguf,
)
from edge_spec.exporters.mtp_layers import (
    MIMO_PREFIX,
    MTP_PREFIX,
    is_only_mtp,
    main_layers,
    mtp_prefix,
)
from edge_spec.exporters.stored_tensor import StoredTensor

_LAYER = "layers.0."
_ALL = "layers.0.experts."  # of the matrices of all of them at once, or of each by its number
_ONE_EXPERT = re.compile(r"layers\.0\.mlp\.experts\.(\d{1,4})\.(gate|up|down)_proj\.weight")
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
    has_experts: bool = False  # where config.json states some
    is_gated: bool = False  # in the rows of each head of queries follow those of its gate

    def ours(self, name: str) -> str | None:
        own = name.removeprefix(self.prefix)
        if self.has_experts and (expert := _ONE_EXPERT.fullmatch(own)):
            return f"{_ALL}{int(expert[1])}.{expert[2]}.weight"
        return self.names.get(own) or our_name(self.in_layer + own)

    def theirs(self, name: str) -> str:
        """Returns what files call a tensor of ours, for messages."""
        named = next((theirs for theirs, ours in self.names.items() if ours == name), None)
        if name.startswith(_ALL) and not named:
            expert, part = name.removeprefix(_ALL).split(".")[:2]
            every = _ALL + part + ".weight"
            of_all = (theirs for theirs, ours in self.names.items() if ours == every)
            named = next(of_all, f"layers.0.mlp.experts.{expert}.{part}_proj.weight")
        return self.prefix + (named or published_name(name).removeprefix(self.in_layer))


_DEEPSEEK = {
    "enorm.weight": "embed_norm",
    "hnorm.weight": "state_norm",
    "eh_proj.weight": "fc.weight",
    "embed_tokens.weight": "embed",
    "shared_head.norm.weight": "norm",
    "shared_head.head.weight": "head",
}
_MIMO = {
    "token_layernorm.weight": "embed_norm",
    "hidden_layernorm.weight": "state_norm",
    "input_proj.weight": "fc.weight",
    "final_layernorm.weight": "norm",
}


_ARCHITECTURES = ("qwen35", "qwen35moe")  # of GGUF
_NO_RETURN = ("qwen3_next",)  # model types with the same names, whose states are not taken back
_ROTATED = "partial_rotary_factor"
_DEFAULTS = {"head_dim": 256, _ROTATED: 0.25}  # of config.json
_DIRECTORY = MtpForm(
    MTP_PREFIX,
    {
        "pre_fc_norm_embedding.weight": "embed_norm",
        "pre_fc_norm_hidden.weight": "state_norm",
        "layers.0.mlp.gate.weight": "layers.0.router.weight",
        "layers.0.mlp.shared_expert_gate.weight": "layers.0.shared_gate.weight",
        "layers.0.mlp.shared_expert.gate_proj.weight": "layers.0.gate.weight",
        "layers.0.mlp.shared_expert.up_proj.weight": "layers.0.up.weight",
        "layers.0.mlp.shared_expert.down_proj.weight": "layers.0.down.weight",
        "layers.0.mlp.experts.gate_up_proj": _ALL + "gate_up.weight",
        "layers.0.mlp.experts.down_proj": _ALL + "down.weight",
    },
    in_layer="",
    norm_offset=1.0,
    has_experts=True,
    is_gated=True,
)
_GGUF_NAMES = {
    "nextn.enorm.weight": "embed_norm",
    "nextn.hnorm.weight": "state_norm",
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.shared_head_norm.weight": "norm",
    "nextn.shared_head_head.weight": "head",
    "nextn.embed_tokens.weight": "embed",
    "attn_norm.weight": "layers.0.input_norm",
    "post_attention_norm.weight": "layers.0.post_norm",
    "attn_q_norm.weight": "layers.0.q_norm",
    "attn_k_norm.weight": "layers.0.k_norm",
    "attn_q.weight": "layers.0.q.weight",
    "attn_k.weight": "layers.0.k.weight",
    "attn_v.weight": "layers.0.v.weight",
    "attn_output.weight": "layers.0.o.weight",
    "ffn_gate.weight": "layers.0.gate.weight",
    "ffn_up.weight": "layers.0.up.weight",
    "ffn_down.weight": "layers.0.down.weight",
    "ffn_gate_inp.weight": "layers.0.router.weight",
    "ffn_gate_inp_shexp.weight": "layers.0.shared_gate.weight",
    "ffn_gate_shexp.weight": "layers.0.gate.weight",
    "ffn_up_shexp.weight": "layers.0.up.weight",
    "ffn_down_shexp.weight": "layers.0.down.weight",
    "ffn_gate_up_exps.weight": _ALL + "gate_up.weight",
    "ffn_gate_exps.weight": _ALL + "gate.weight",
    "ffn_up_exps.weight": _ALL + "up.weight",
    "ffn_down_exps.weight": _ALL + "down.weight",
}
# Of config.json, by the keys of GGUF, with their types.
_KEYS: Mapping[str, tuple[str, type]] = {
    **GGUF_SIZES,
    "head_dim": ("attention.key_length", int),
    "rope_theta": ("rope.freq_base", float),
}
_WITH_EXPERTS = ("qwen35moe",)
_KEYS_OF_EXPERTS: Mapping[str, tuple[str, type]] = {
    "intermediate_size": ("expert_shared_feed_forward_length", int),
    "num_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}


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
    experts = _stated_experts(path, values) if form.is_gated else None
    if experts is not None:
        named = each_expert(path, named, experts)
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
        experts=experts,
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


def _stated_experts(path: Path, values: Mapping[str, Any]) -> HeadExperts | None:
    """Raises ModelFileError for counts that no head has."""
    if not values.get("num_experts"):
        return None
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    found = HeadExperts(*(count(path, values, key) for key in keys))
    if found.used > found.count:
        raise ModelFileError(
            f"{path} takes {found.used} of {found.count} experts", remedy="Download it again."
        )
    return found


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
    require_shape(head.path, form.theirs(_QUERIES), stored, expected)
    assert stored is not None
    rows = np.arange(expected[0]).reshape(config.num_heads, 2, config.head_dim)
    for name, order in ((_QUERIES, rows[:, 0].ravel()), (_GATE, rows[:, 1].ravel())):
        read = partial(_rows_in_order, stored, order)
        yield name, replace(stored, shape=(len(order), *stored.shape[1:]), read_rows=read)


def _rows_in_order(stored: StoredTensor, order: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
    """Reads some rows of a matrix, which stay in their file until they are asked for."""
    return stored.rows(order[rows]).data


def first_tensor(names: Iterable[str]) -> str | None:
    """Returns the name of a tensor of Qwen 3.5's layer, where a directory has any."""
    return next((name for name in names if name.startswith(MTP_PREFIX)), None)


def directory_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    path, values = files.path, files.values
    text = {**_DEFAULTS, **values, **mapping(values, "text_config")}
    rope = mapping(text, "rope_parameters")
    text[_ROTATED] = rope.get(_ROTATED, text[_ROTATED])
    if text.get("num_experts"):
        text["intermediate_size"] = text.get("shared_expert_intermediate_size")
    if values.get("model_type") in _NO_RETURN:
        raise UnsupportedModelError(
            f"{path} has a layer for multi-token prediction "
            f"({str(first_tensor(files.tensors))[:100]}) of a {values['model_type']} model: "
            "llama.cpp, where alone such models run, does not take back their recurrent "
            "states, as rejected draft tokens need it",
            remedy="Use a model of attention alone, or Qwen 3.5.",
        )
    return head_of_form(replace(files, values=text), _DIRECTORY)


def is_gguf_head(path: Path, is_targets: bool) -> bool:
    """Returns whether this file has such a layer and no more of a model. is_targets: it is the
    target's own file, of which the model itself is no draft."""
    if first_architecture(path) not in _ARCHITECTURES:
        return False
    try:
        file = GgufFile(path)
        first = main_layers(Metadata(file.metadata, path))
    except ModelFileError:
        return False  # whoever opens it as a model says what is wrong
    return first is not None and (is_targets or is_only_mtp(file.tensors))


def gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    metadata = Metadata(file.metadata, path)
    architecture = metadata.require("general.architecture", str)
    first = main_layers(metadata)
    form = MtpForm(f"blk.{first}.", _GGUF_NAMES, is_gated=True)
    if first is None or not any(name.startswith(form.prefix) for name in file.tensors):
        raise ModelFileError(
            f"{path} has no layer for multi-token prediction",
            remedy="Convert the model again, without --no-mtp, or use it without --draft.",
        )
    stated = {**_KEYS, **(_KEYS_OF_EXPERTS if architecture in _WITH_EXPERTS else {})}
    whose, remedy = "its layer for multi-token prediction", "Use the model without --draft."
    values = stated_in_gguf(metadata, stated, {}, whose, remedy) | {"num_hidden_layers": first}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    return head_of_form(HeadFiles(path, values, file.tensors, target, has_weights), form)
