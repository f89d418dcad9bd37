"""DFlash heads as z-lab publishes them, and DSpark heads, which have more.

They state the same in three ways: z-lab, SpecForge and Liquid AI in `dflash_config`, DeepSpec
beside the sizes of layers, speculators with the sizes of layers apart. Layer ids name layers whose
output is read, but those of speculators, which name inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import Confidence, DFlashHead, FollowsBy, Transitions
from edge_spec.exporters.heads.eagle import (
    head_config,
    head_window,
    require_target,
    rows_of,
    token_ids,
)
from edge_spec.exporters.heads.head_files import (
    TURNS_HALVES,
    VOCABULARY,
    HeadFiles,
    Shapes,
    StoredTensors,
    count,
    download_again,
    known_token,
    layer_shapes,
    mapping,
    named_as_ours,
    not_computed,
    other_target,
    published_name,
    require_exactly,
    unusable,
    with_halves,
)
from edge_spec.exporters.stored_tensor import StoredTensor

_CONTEXT_NORM = "hidden_norm.weight"
_MAX_BLOCK = 64  # tokens
_OWN_TARGET = "Use the head with the model that it was trained for."
_INPUT_IDS, _OUTPUT_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"
# Of config.json, what only such heads state.
MARKS = ("dflash_config", "markov_rank", _INPUT_IDS, _OUTPUT_IDS)
_PROJECTORS = (None, "dflash", "dspark")
_DSPARK = "dspark"
# What heads state that compute otherwise than here.
_OTHERWISE = (
    "is_causal",
    "causal",
    "use_swa",
    "conv_kernel_size",
    "selector_rank",
    "attention_value_scale",
    "output_multiplier",
    "input_embedding_scale",
    "final_logit_softcapping",
)


@dataclass(frozen=True)
class _Stated:
    """What config.json states, in whichever way."""

    path: Path
    values: Mapping[str, Any]  # of the head
    sizes: Mapping[str, Any]  # of its layers

    @classmethod
    def of(cls, files: HeadFiles) -> _Stated:
        """Raises UnsupportedModelError for a head that computes otherwise."""
        path, top = files.path, files.values
        values = {**top, **mapping(top, "dflash_config")}
        projector = values.get("projector_type")
        if projector not in _PROJECTORS:
            raise not_computed(
                f"{path} has a projector of the kind {str(projector)[:100]}, which is not computed"
            )
        otherwise = next((each for each in _OTHERWISE if values.get(each)), None)
        if otherwise is not None:
            raise not_computed(f"{path} states {otherwise}, which is not computed for DFlash heads")
        return cls(path, values, {**top, **mapping(top, "transformer_layer_config")})

    def feature_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Raises as `open_head` does."""
        is_input = _INPUT_IDS in self.values
        ids = self.values.get(_INPUT_IDS if is_input else _OUTPUT_IDS)
        layers = self.values.get("num_target_layers")
        if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
            raise download_again(f"{self.path} names no layers")
        found = [each if is_input else each + 1 for each in ids]
        told = isinstance(layers, int) and layers != target.num_layers
        # The output of the last layer is no input of any: features have it after the final norm.
        if told or ids != sorted(set(ids)) or not 0 <= found[0] <= found[-1] < target.num_layers:
            what = "inputs" if is_input else "outputs"
            raise other_target(
                f"{self.path} drafts from the {what} of the layers {ids} of {layers or 'some'} "
                f"layers, which a target of {target.num_layers} layers has not"
            )
        return tuple(found)

    def mask_token(self, target: ModelConfig) -> int:
        """Raises as `open_head` does."""
        token = self.values.get("mask_token_id")
        if not isinstance(token, int) or isinstance(token, bool):
            raise unusable(self.path, "usable mask_token_id")
        return known_token(self.path, token, target.vocab_size)

    def scores_next(self, has_transitions: bool) -> bool:
        """Says whether each row scores the token after its own, as DeepSpec's do."""
        told = self.values.get("sample_from_anchor", self.values.get("shift_label"))
        if isinstance(told, bool):
            return told
        if _INPUT_IDS in self.values:  # speculators, before its config.json told
            return False
        is_deepspec = "dflash_config" not in self.values
        return is_deepspec or has_transitions or self.values.get("projector_type") == _DSPARK


def dflash_head(files: HeadFiles) -> DFlashHead:
    """Raises as `open_head` does."""
    path, target, stated = files.path, files.target, _Stated.of(files)
    parts, tensors = divided(files.tensors)
    dspark = DSparkParts(path, stated.values, parts)
    named = named_as_ours(path, {n: t for n, t in tensors.items() if n != _CONTEXT_NORM})
    if _CONTEXT_NORM in tensors:
        named["context_norm"] = tensors[_CONTEXT_NORM]
    config = head_config(path, stated.sizes, named, target, "dflash")
    if head_window(path, stated.sizes) is not None:
        raise not_computed(f"{path} has a sliding window, which is not computed for DFlash heads")
    layers = stated.feature_layers(target)
    size = count(path, stated.values, "block_size")
    scores_next = stated.scores_next(AFTER in parts)
    least = 1 if scores_next else 2
    if not least <= size <= _MAX_BLOCK:
        raise unusable(path, f"usable block_size: it is {size}, expected {least} to {_MAX_BLOCK}")
    head = DFlashHead(
        path=path,
        config=config,
        feature_layers=layers,
        feature_size=target.hidden_size,
        tensors={},
        block_size=size,
        mask_token=stated.mask_token(target),
        scores_next=scores_next,
        token_ids=token_ids(path, tensors.get(VOCABULARY[0]), files.values, target),
    )
    require_target(head, named, stated.sizes, target)
    shapes = _shapes(head, named)
    scored = target.vocab_size if head.token_ids is None else len(head.token_ids)
    shapes |= dspark.shapes(config.hidden_size, target.vocab_size, scored)
    require_exactly(path, named | parts, shapes, _published, "which no DFlash head has")
    head = replace(head, transitions=dspark.transitions(), confidence=dspark.confidence())
    if not files.has_weights:
        return head
    if stated.values.get(TURNS_HALVES) is False:
        named |= with_halves(config, named)
    embed_rows, head_rows = (rows_of(named.get(name)) for name in ("embed", "head"))
    return replace(head, tensors=StoredTensors(named), embed_rows=embed_rows, head_rows=head_rows)


def _published(name: str) -> str:
    if name == "context_norm":
        return _CONTEXT_NORM
    return name if name.startswith(("markov_head.", "confidence_head.")) else published_name(name)


def _shapes(head: DFlashHead, named: Mapping[str, StoredTensor]) -> Shapes:
    config, hidden = head.config, head.config.hidden_size
    joined = len(head.feature_layers) * head.feature_size
    shapes: Shapes = {
        "fc.weight": (hidden, joined),
        "context_norm": (hidden,),
        "norm": (hidden,),
    }
    tokens = config.vocab_size
    scored = tokens if head.token_ids is None else len(head.token_ids)
    own_tables = {"embed": (tokens, hidden), "head": (scored, hidden)}
    shapes |= {name: shape for name, shape in own_tables.items() if name in named}
    for layer in range(config.num_layers):
        norms = {
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
            "input_norm": (hidden,),
        }
        own = {**layer_shapes(config, hidden), **norms}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


AFTER, SCORED = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj"
_JOINED = {FollowsBy.GATED: "markov_head.gate_proj", FollowsBy.RECURRENT: "markov_head.joint_proj"}
_PARTS = ("markov_", "confidence_")  # how names of such tensors begin
_ALSO = {"markov_w1.weight": AFTER, "markov_w2.weight": SCORED}


@dataclass(frozen=True)
class DSparkParts:
    """The tensors of these parts, by the names that DeepSpec has; none for a DFlash head."""

    path: Path
    values: Mapping[str, Any]  # what config.json states of the head
    tensors: Mapping[str, StoredTensor]

    @property
    def rank(self) -> int:
        return self.tensors[AFTER].shape[-1] if AFTER in self.tensors else 0

    @property
    def kind(self) -> FollowsBy:
        """Raises UnsupportedModelError for a kind that is not computed."""
        told = self.values.get("markov_head_type", FollowsBy.TOKEN.value)
        try:
            return FollowsBy(told)
        except ValueError:
            raise not_computed(
                f"{self.path} has a Markov head of the kind {str(told)[:100]}, which is not "
                f"computed; known are {', '.join(each.value for each in FollowsBy)}"
            ) from None

    def shapes(self, hidden_size: int, vocab_size: int, num_scored: int) -> Shapes:
        """Returns the shapes of all tensors that the head has to have. Raises ModelFileError for
        one without the parts that config.json states."""
        rank = self.rank
        shapes: Shapes = {}
        stated = self.values.get("markov_rank")
        if (AFTER in self.tensors or SCORED in self.tensors) or stated:
            if stated is not None and rank != stated:
                found = f"of rank {rank}" if rank else "missing"
                raise download_again(
                    f"{self.path}: its Markov head is {found}, config.json states the rank "
                    f"{str(stated)[:20]}"
                )
            shapes = {AFTER: (vocab_size, rank), SCORED: (num_scored, rank)}
            joined = {
                FollowsBy.GATED: (rank, hidden_size + rank),
                FollowsBy.RECURRENT: (3 * rank, 2 * rank + hidden_size),
            }.get(self.kind)
            if joined is not None:
                name = _JOINED[self.kind]
                shapes |= {name + ".weight": joined, name + ".bias": joined[:1]}
        if self.has_confidence or self.values.get("enable_confidence_head"):
            read = hidden_size + (
                rank if self.values.get("confidence_head_with_markov", rank) else 0
            )
            shapes |= {_CONFIDENCE + ".weight": (1, read), _CONFIDENCE + ".bias": (1,)}
        return shapes

    @property
    def has_confidence(self) -> bool:
        return _CONFIDENCE + ".weight" in self.tensors

    def transitions(self) -> Transitions | None:
        """Returns None for a head without; its tensors have the right shapes."""
        if AFTER not in self.tensors:
            return None
        after, scored, kind = self.tensors[AFTER], self.tensors[SCORED], self.kind
        joined = None
        if kind in _JOINED:
            joined = (
                self._float32(_JOINED[kind] + ".weight"),
                self._float32(_JOINED[kind] + ".bias"),
            )
        return Transitions(
            kind,
            self.rank,
            lambda tokens: after.rows(tokens).float32(),
            lambda tokens: scored.rows(tokens).float32(),
            joined,
        )

    def confidence(self) -> Confidence | None:
        """See transitions."""
        if not self.has_confidence:
            return None
        weight, bias = (self._float32(f"{_CONFIDENCE}.{part}") for part in ("weight", "bias"))
        return Confidence(weight[0], float(bias[0]))

    def _float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()


def divided(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns the tensors of these parts, by their names of DeepSpec, and all others."""
    parts: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        if own.startswith(_PARTS):
            own = _ALSO.get(own, own.replace("confidence_proj.", _CONFIDENCE + "."))
            parts[own] = tensor
        else:
            others[own] = tensor
    return parts, others
