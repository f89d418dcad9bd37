"""DFlash heads as z-lab publishes them and as llama.cpp converts them, and DSpark heads, which have
more.

They state the same in three ways: z-lab, SpecForge and Liquid AI in `dflash_config`, DeepSpec
beside the sizes of layers, speculators with the sizes of layers apart. Layer ids name layers whose
output is read, but those of speculators, which name inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import Confidence, DFlashHead, FollowsBy, Transitions
from edge_spec.exporters.heads import eagle
from edge_spec.exporters.heads.eagle import (
    head_config,
    head_window,
    require_target,
    without_prefixes,
)
from edge_spec.exporters.heads.head_files import (
    HeadFiles,
    Names,
    Shapes,
    count,
    feature_layers,
    layer_shapes,
    mapping,
    mask_token,
    not_computed,
    other_target,
    require_shapes,
    scored_tokens,
    unusable,
    with_weights,
)
from edge_spec.exporters.stored_tensor import StoredTensor

_MAX_BLOCK = 64  # tokens
_INPUT_IDS, _OUTPUT_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"
# Of config.json, what only such heads state.
MARKS = ("dflash_config", "markov_rank", _INPUT_IDS, _OUTPUT_IDS)
_PROJECTORS = (None, "dflash", "dspark")
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
# DSpark's parts, which DeepSpec names so.
_AFTER, _SCORED = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_JOINED = {FollowsBy.GATED: "markov_head.gate_proj", FollowsBy.RECURRENT: "markov_head.joint_proj"}
_CONFIDENCE = "confidence_head.proj"
_LINEAR = (*_JOINED.values(), _CONFIDENCE)
_ENDS = ("weight", "bias")
_PARTS = {
    "markov_w1.weight": _AFTER,
    "markov_w2.weight": _SCORED,
    **{f"confidence_proj.{end}": f"{_CONFIDENCE}.{end}" for end in _ENDS},
    **{name: name for name in (_AFTER, _SCORED)},
    **{f"{name}.{end}": f"{name}.{end}" for name in _LINEAR for end in _ENDS},
}
NAMES = replace(
    eagle.NAMES,
    whole={**eagle.NAMES.whole, "hidden_norm.weight": "context_norm", **_PARTS},
)
GGUF_NAMES = replace(
    eagle.GGUF_NAMES,
    whole={
        **eagle.GGUF_NAMES.whole,
        **_PARTS,
        **{f"conf_proj.{end}": f"{_CONFIDENCE}.{end}" for end in _ENDS},
        "enc.output_norm.weight": "context_norm",
    },
)


def dflash_head(files: HeadFiles, names: Names = NAMES) -> DFlashHead:
    """Raises as `open_head` does."""
    path, target, top = files.path, files.target, files.values
    values = {**top, **mapping(top, "dflash_config")}
    sizes = {**top, **mapping(top, "transformer_layer_config")}
    _require_computed(path, values)
    named = names.rename(path, without_prefixes(files.tensors))
    config = head_config(path, sizes, named, target, "dflash")
    if head_window(path, sizes) is not None:
        raise not_computed(f"{path} has a sliding window, which is not computed for DFlash heads")
    scores_next = _scores_next(values, _AFTER in named)
    size, least = count(path, values, "block_size"), 1 if scores_next else 2
    if not least <= size <= _MAX_BLOCK:
        raise unusable(path, f"usable block_size: it is {size}, expected {least} to {_MAX_BLOCK}")
    head = DFlashHead(
        path=path,
        config=config,
        feature_layers=_feature_layers(path, values, target),
        feature_size=target.hidden_size,
        tensors={},
        block_size=size,
        mask_token=mask_token(path, values, "mask_token_id", target.vocab_size),
        scores_next=scores_next,
        token_ids=scored_tokens(files),
    )
    require_target(head, named, sizes, target)
    follows = _follows_by(path, values) if _AFTER in named else FollowsBy.TOKEN
    require_shapes(path, names, named, _shapes(head, named, values, follows))
    head = replace(
        head,
        transitions=_transitions(named, follows) if _AFTER in named else None,
        confidence=_confidence(named) if f"{_CONFIDENCE}.weight" in named else None,
    )
    parts = ("markov_head.", "confidence_head.")
    layers = {name: each for name, each in named.items() if not name.startswith(parts)}
    return with_weights(head, files, layers)


def _require_computed(path: Path, values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for a head that computes otherwise."""
    projector = values.get("projector_type")
    if projector not in _PROJECTORS:
        told = f"{path} has a projector of the kind {str(projector)[:100]}"
        raise not_computed(f"{told}, which is not computed")
    otherwise = next((each for each in _OTHERWISE if values.get(each)), None)
    if otherwise is not None:
        raise not_computed(f"{path} states {otherwise}, which is not computed for DFlash heads")


def _feature_layers(path: Path, values: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    depth = values.get("num_target_layers")
    if isinstance(depth, int) and depth != target.num_layers:
        raise other_target(
            f"{path} is a head for a target of {depth} layers, this one has {target.num_layers}"
        )
    if _INPUT_IDS in values:
        return feature_layers(path, values[_INPUT_IDS], target, are_outputs=False)
    return feature_layers(path, values.get(_OUTPUT_IDS), target, are_outputs=True)


def _scores_next(values: Mapping[str, Any], has_transitions: bool) -> bool:
    """Says whether each row scores the token after its own, as DeepSpec's do."""
    told = values.get("sample_from_anchor", values.get("shift_label"))
    if isinstance(told, bool):
        return told
    if _INPUT_IDS in values:  # speculators, before its config.json told
        return False
    is_deepspec = "dflash_config" not in values
    return is_deepspec or has_transitions or values.get("projector_type") == "dspark"


def _follows_by(path: Path, values: Mapping[str, Any]) -> FollowsBy:
    """Raises UnsupportedModelError for a kind that is not computed."""
    told = values.get("markov_head_type", FollowsBy.TOKEN.value)
    try:
        return FollowsBy(told)
    except ValueError:
        raise not_computed(
            f"{path} has a Markov head of the kind {str(told)[:100]}, which is not computed; known "
            f"are {', '.join(each.value for each in FollowsBy)}"
        ) from None


def _shapes(
    head: DFlashHead,
    named: Mapping[str, StoredTensor],
    values: Mapping[str, Any],
    follows: FollowsBy,
) -> Shapes:
    config, hidden, tokens = head.config, head.config.hidden_size, head.config.vocab_size
    scored = tokens if head.token_ids is None else len(head.token_ids)
    shapes: Shapes = {
        "fc.weight": (hidden, len(head.feature_layers) * head.feature_size),
        "context_norm": (hidden,),
        "norm": (hidden,),
    }
    own_tables = {"embed": (tokens, hidden), "head": (scored, hidden)}
    shapes |= {name: shape for name, shape in own_tables.items() if name in named}
    norms = {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,), "input_norm": (hidden,)}
    for layer in range(config.num_layers):
        own = {**layer_shapes(config, hidden), **norms}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    rank = named[_AFTER].shape[-1] if _AFTER in named else 0
    if values.get("markov_rank"):
        rank = count(head.path, values, "markov_rank")
    if rank or _SCORED in named:
        shapes |= {_AFTER: (tokens, rank), _SCORED: (scored, rank)}
        joined = {
            FollowsBy.GATED: (rank, hidden + rank),
            FollowsBy.RECURRENT: (3 * rank, 2 * rank + hidden),
        }
        if follows in _JOINED:
            name = _JOINED[follows]
            shapes |= {name + ".weight": joined[follows], name + ".bias": joined[follows][:1]}
    if f"{_CONFIDENCE}.weight" in named or values.get("enable_confidence_head"):
        reads_markov = values.get("confidence_head_with_markov", True)
        read = hidden + (rank if reads_markov else 0)
        shapes |= {_CONFIDENCE + ".weight": (1, read), _CONFIDENCE + ".bias": (1,)}
    return shapes


def _transitions(named: Mapping[str, StoredTensor], kind: FollowsBy) -> Transitions:
    after, scored, joined = named[_AFTER], named[_SCORED], None
    if kind in _JOINED:
        weight, bias = (named[f"{_JOINED[kind]}.{end}"].float32() for end in _ENDS)
        joined = weight, bias
    return Transitions(
        kind,
        after.shape[-1],
        lambda tokens: after.rows(tokens).float32(),
        lambda tokens: scored.rows(tokens).float32(),
        joined,
    )


def _confidence(named: Mapping[str, StoredTensor]) -> Confidence:
    weight, bias = (named[f"{_CONFIDENCE}.{end}"].float32() for end in _ENDS)
    return Confidence(weight[0], float(bias[0]))
