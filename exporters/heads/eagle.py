"""EAGLE heads: of SafeAILab, which published the method, of speculators and of SpecForge.

They differ in names, in how they count layers and in options; `EagleHead` says all of it in one
way. Layer ids of SpecForge are those of layers whose output is read, all others name inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead, MaskedRows
from edge_spec.errors import ModelFileError
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.heads.head_files import (
    TURNS_HALVES,
    VOCABULARY,
    HeadFiles,
    StoredTensors,
    count,
    download_again,
    known_token,
    mapping,
    named_as_ours,
    not_computed,
    other_target,
    require_shapes,
    scored_tokens,
    unusable,
    with_halves,
)
from edge_spec.exporters.stored_tensor import StoredTensor

MASKED = "mask_hidden"  # [..., features] of a token of which nothing is known
_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # how config.json calls that token
_PARALLEL = "parallel_drafting"
_KIND = "peagle"
_COUNT, _MAX_COUNT = 8, 64  # tokens: as heads are trained where config.json does not tell


def masked_rows(
    head: EagleHead, values: Mapping[str, Any], stored: StoredTensor | None
) -> MaskedRows | None:
    """Returns None for a head that drafts one token after the other. Raises ModelFileError for one
    that lacks what it needs for several, UsageError for a token that the target has not."""
    stated = mapping(values, "speculators_config")
    if stored is None:
        kinds = (values.get("speculators_model_type"), stated.get("algorithm"))
        if values.get(_PARALLEL) or _KIND in kinds:
            raise download_again(
                f"{head.path} drafts several tokens in one pass, but tensor {MASKED} is missing"
            )
        return None
    size = len(head.feature_layers) * head.feature_size
    if math.prod(stored.shape) != size or stored.shape[-1] != size:
        raise ModelFileError(
            f"{head.path}: tensor {MASKED} has the shape {list(stored.shape)}, expected [{size}]",
            remedy="Download the head again, or use it with its own target.",
        )
    return MaskedRows(
        _token(head, values), stored.float32().reshape(-1), _count(head, values, stated)
    )


def _token(head: EagleHead, values: Mapping[str, Any]) -> int:
    told = next((values[name] for name in _TOKENS if values.get(name) is not None), None)
    if isinstance(told, bool) or not str(told).isdecimal() or len(str(told)) > 9:
        raise unusable(head.path, f"usable {_TOKENS[0]}")
    return known_token(head.path, int(str(told)), head.config.vocab_size)


def _count(head: EagleHead, values: Mapping[str, Any], stated: Mapping[str, Any]) -> int:
    methods = stated.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    told = first if isinstance(first, dict) else values
    return min(count(head.path, told, "speculative_tokens", _COUNT), _MAX_COUNT)


PADDING = 512  # rows that tables of one vocabulary differ by, padded or not


def eagle_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    path, values, tensors, target = files.path, files.values, files.tensors, files.target
    sizes = {**values, **mapping(values, "transformer_layer_config")}
    masked = tensors.get(MASKED)
    named = named_as_ours(path, {n: t for n, t in tensors.items() if n != MASKED})
    marks = named.keys() | tensors.keys()
    reads_beside = not marks.isdisjoint({"layers.0.hidden_norm", "norm", *VOCABULARY})
    layers = _feature_layers(path, values, target) if reads_beside else (target.num_layers,)
    config = head_config(path, sizes, named, target)
    ids = token_ids(path, tensors.get("d2t"), values, target)
    scored = target.vocab_size if ids is None else len(ids)
    head = EagleHead(
        kind=("EAGLE-3" if masked is None else "P-EAGLE") if reads_beside else "EAGLE-1",
        path=path,
        config=config,
        feature_layers=layers,
        feature_size=target.hidden_size,
        tensors={},
        joins_embedding=not reads_beside,
        adds_to_normed=bool(values.get("norm_before_residual", False)),
        returns_normed=bool(values.get("norm_output", False)),
        token_ids=ids,
        window=head_window(path, sizes),
    )
    require_target(head, named, sizes, target)
    # Norms that config.json asks for: without them a head would silently draft worse.
    options = {"norm_before_fc": "fc_norm", "fc_norm": "feature_norm.0"}
    asked = frozenset(name for option, name in options.items() if values.get(option) is True)
    require_shapes(head, named, scored, asked)
    head = replace(head, masks=masked_rows(head, values, masked))
    if values.get(TURNS_HALVES) is False:
        named |= with_halves(config, named)
    return with_weights(head, named) if files.has_weights else head


def with_weights(head: EagleHead, named: Mapping[str, StoredTensor]) -> EagleHead:
    """Returns the head with its tensors, which stay in their files until they are asked for."""
    embed_rows, head_rows = (rows_of(named.get(name)) for name in ("embed", "head"))
    return replace(head, tensors=StoredTensors(named), embed_rows=embed_rows, head_rows=head_rows)


def rows_of(table: StoredTensor | None) -> Callable[[np.ndarray], np.ndarray] | None:
    return None if table is None else lambda rows: table.rows(rows).float32()


def _feature_layers(path: Path, values: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Returns layers; by default the 3rd one, the middle one, and the 3rd from the end."""
    of_outputs = mapping(values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    if of_outputs is not None:
        ids = [each + 1 if isinstance(each, int) else each for each in _listed(of_outputs)]
    if ids is None:
        ids = [2, target.num_layers // 2, target.num_layers - 3]
    found = _listed(ids)
    if not found or not all(isinstance(each, int) for each in found):
        raise download_again(f"{path} names no layers")
    if found != sorted(set(found)) or not 0 <= found[0] <= found[-1] < target.num_layers:
        raise other_target(
            f"{path} drafts from the inputs of the layers {found}, of which a target of "
            f"{target.num_layers} layers has not all in this order"
        )
    return tuple(found)


def head_config(
    path: Path,
    sizes: Mapping[str, Any],
    named: Mapping[str, StoredTensor],
    target: ModelConfig,
    architecture: str = "eagle",
) -> ModelConfig:
    """Raises ModelFileError for sizes that no head has, UnsupportedModelError for what is not
    computed for heads."""
    stated = StatedConfig(sizes, path / "config.json")
    heads = count(path, sizes, "num_attention_heads")
    try:
        rope, rotary_dim = stated.rope(), stated.rotary_dim
        epsilon, head_dim = float(sizes.get("rms_norm_eps", 1e-6)), stated.head_dim
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unusable(path, f"valid value: {error}") from None
    if sizes.get("hidden_act", "silu") != "silu":
        raise not_computed(
            f"{path} has an activation other than silu, which is not computed for trained heads"
        )
    config = ModelConfig(
        architecture=architecture,
        num_layers=1
        + max((int(name.split(".")[1]) for name in named if "layers." in name), default=0),
        hidden_size=count(path, sizes, "hidden_size"),
        intermediate_size=count(path, sizes, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=count(path, sizes, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_epsilon=epsilon,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rotary_dim,
        qk_norm="layers.0.q_norm" in named,
        qkv_bias="layers.0.q.bias" in named,
    )
    for name, valid in (
        ("rms_norm_eps", 0 <= epsilon < 1),
        ("rope_theta", 1 < rope.theta < float("inf")),
        ("head_dim", head_dim > 0 and head_dim % 2 == 0),
        ("partial_rotary_factor", 0 < config.rotated <= head_dim and config.rotated % 2 == 0),
        ("num_key_value_heads", heads % config.num_kv_heads == 0),
    ):
        if not valid:
            raise unusable(path, f"usable {name}")
    return config


def head_window(path: Path, sizes: Mapping[str, Any]) -> int | None:
    """Returns how far a row sees, where all layers of a head have a sliding window. Raises
    UnsupportedModelError where some layers have one and others none."""
    window, kinds = sizes.get("sliding_window"), sizes.get("layer_types")
    if window is None or sizes.get("use_sliding_window") is False:
        return None
    sliding = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else [True]
    if any(sliding) and not all(sliding):
        raise not_computed(
            f"{path} has a sliding window in some of its layers, which is not computed for heads"
        )
    return count(path, sizes, "sliding_window") if any(sliding) else None


def token_ids(
    path: Path, offsets: StoredTensor | None, values: Mapping[str, Any], target: ModelConfig
) -> np.ndarray | None:
    """The target's id of each token that the head scores: `d2t` has how much larger it is."""
    scored = values.get("draft_vocab_size")
    if offsets is None or scored == target.vocab_size:  # then the published code maps nothing
        if scored is not None and scored != target.vocab_size:
            raise download_again(
                f"{path} scores {scored} tokens, but does not say which: tensor d2t is missing"
            )
        return None
    return scored_tokens(path, offsets, target.vocab_size)


def require_target(
    head: EagleHead | DFlashHead,
    named: Mapping[str, StoredTensor],
    sizes: Mapping[str, Any],
    target: ModelConfig,
) -> None:
    """Raises UsageError for the head of a target of another width or vocabulary."""
    joined = named["fc.weight"].shape[-1] if "fc.weight" in named else 0
    width, tokens = head.config.hidden_size, sizes.get("vocab_size")
    joins_embedding = isinstance(head, EagleHead) and head.joins_embedding
    given = target.hidden_size * (2 if joins_embedding else len(head.feature_layers))
    told = None
    if isinstance(head, EagleHead) and joined not in (0, given):
        told = f"it reads {joined} numbers of a token, this target gives {given}"
    elif isinstance(tokens, int) and abs(tokens - target.vocab_size) > PADDING:
        told = f"its vocabulary has {tokens} tokens, this target's {target.vocab_size}"
    elif width != target.hidden_size and not {"embed", "head"} <= named.keys():
        told = f"it shares tables of {width} numbers a row, this target's have {target.hidden_size}"
    if told is not None:
        raise other_target(f"{head.path} is a head for another target: {told}")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []
