"""EAGLE heads: of SafeAILab, which published the method, of speculators and of SpecForge.

They differ in names, in how they count layers and in options; `EagleHead` says all of it in one
way. Layer ids of SpecForge are those of layers whose output is read, all others name inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.stored_tensor import StoredTensor

# Theirs -> ours, without the names of layers.
_WHOLE = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "input_norm.weight": "fc_norm",
    "embed_tokens.weight": "embed",
    "lm_head.weight": "head",
    "norm.weight": "norm",
}
_OF_LAYERS = {
    "hidden_norm.weight": "hidden_norm",
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_PROJECTION = re.compile(r"(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_LAYER = re.compile(r"(?:midlayer|layers\.(\d{1,3}))\.(.+)")
_VOCABULARY = ("d2t", "t2d")
_DEFAULT_THETA = 10_000.0  # what the published code takes where the config has none


def eagle_head(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor], target: ModelConfig
) -> EagleHead:
    """values: of config.json. Raises as `open_head` does."""
    sizes = {**values, **_mapping(values, "transformer_layer_config")}
    named = dict(_named(path, tensors))
    reads_beside = "layers.0.hidden_norm" in named
    layers = _feature_layers(path, values, target) if reads_beside else (target.num_layers,)
    config = _config(path, sizes, named, target)
    token_ids = _token_ids(path, tensors.get("d2t"), values, target)
    scored = target.vocab_size if token_ids is None else len(token_ids)
    head = EagleHead(
        kind="EAGLE-3" if reads_beside else "EAGLE-1",
        path=path,
        config=config,
        feature_layers=layers,
        feature_size=target.hidden_size,
        tensors={},
        joins_embedding=not reads_beside,
        adds_to_normed=bool(values.get("norm_before_residual", False)),
        returns_normed=bool(values.get("norm_output", False)),
        token_ids=token_ids,
    )
    _require_target(head, named, target)
    _require_shapes(head, named, scored, target)
    return replace(head, tensors={name: tensor.float32() for name, tensor in named.items()})


def _named(path: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Raises UnsupportedModelError for a tensor that no format has."""
    for name, tensor in tensors.items():
        if name in _VOCABULARY or name.endswith("rotary_emb.inv_freq"):
            continue
        ours = _our_name(name.removeprefix("model."))
        if ours is None:
            raise UnsupportedModelError(
                f"{path} has weights that no known head has, such as {name[:200]}",
                remedy="Use a head of a kind that docs/drafters.md lists.",
            )
        yield ours, tensor


def _our_name(name: str) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    if match := re.fullmatch(r"fc_norm\.(\d)\.weight", name):
        return f"feature_norm.{match[1]}"
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix = f"layers.{int(layer[1] or 0)}."
    if layer[2] in _OF_LAYERS:
        return prefix + _OF_LAYERS[layer[2]]
    projection = _PROJECTION.fullmatch(layer[2])
    return projection and f"{prefix}{projection[1]}.{projection[2]}"


def _feature_layers(path: Path, values: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """By default the 3rd layer's input, the middle one's, and that of the 3rd from the end."""
    of_outputs = _mapping(values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    if of_outputs is not None:
        ids = [each + 1 if isinstance(each, int) else each for each in _listed(of_outputs)]
    if ids is None:
        ids = [2, target.num_layers // 2, target.num_layers - 3]
    found = _listed(ids)
    if not found or not all(isinstance(each, int) for each in found):
        raise ModelFileError(f"{path} names no layers", remedy="Download the head again.")
    if found != sorted(set(found)) or not 0 <= found[0] <= found[-1] < target.num_layers:
        raise UsageError(
            f"{path} drafts from the inputs of the layers {found}, of which a target of "
            f"{target.num_layers} layers has not all in this order",
            remedy="Use the head with the model that it was trained for.",
        )
    return tuple(found)


def _config(
    path: Path, sizes: Mapping[str, Any], named: Mapping[str, StoredTensor], target: ModelConfig
) -> ModelConfig:
    """Raises ModelFileError for sizes that no head has."""
    if _mapping(sizes, "rope_scaling").get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"{path} scales its rotary frequencies, which is not computed for heads",
            remedy="Use another head.",
        )
    if sizes.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{path} has the activation {str(sizes['hidden_act'])[:50]!r}, which is not computed "
            "for heads",
            remedy="Use another head.",
        )
    hidden, heads = _count(path, sizes, "hidden_size"), _count(path, sizes, "num_attention_heads")
    num_layers = 1 + max(int(name.split(".")[1]) for name in named if name.startswith("layers."))
    rope = _mapping(sizes, "rope_parameters").get("rope_theta", sizes.get("rope_theta"))
    return ModelConfig(
        architecture="eagle",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_count(path, sizes, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_count(path, sizes, "num_key_value_heads", heads),
        head_dim=_count(path, sizes, "head_dim", max(hidden // heads, 1)),
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_epsilon=float(sizes.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope or _DEFAULT_THETA),
        qk_norm="layers.0.q_norm" in named,
        qkv_bias="layers.0.q.bias" in named,
    )


def _token_ids(
    path: Path, offsets: StoredTensor | None, values: Mapping[str, Any], target: ModelConfig
) -> np.ndarray | None:
    """The target's id of each token that the head scores: `d2t` has how much larger it is."""
    scored = values.get("draft_vocab_size")
    if offsets is None:
        if scored is not None and scored != target.vocab_size:
            raise ModelFileError(
                f"{path} scores {scored} tokens, but does not say which: tensor d2t is missing",
                remedy="Download the head again.",
            )
        return None
    ids = np.frombuffer(offsets.data.tobytes(), np.int64) + np.arange(offsets.shape[0])
    if ids.min() < 0 or ids.max() >= target.vocab_size or len(np.unique(ids)) < len(ids):
        raise UsageError(
            f"{path}: d2t names a token twice, or one beyond the target's vocabulary of "
            f"{target.vocab_size}",
            remedy="Use the head with the model that it was trained for.",
        )
    return ids


def _require_target(
    head: EagleHead, named: Mapping[str, StoredTensor], target: ModelConfig
) -> None:
    """Raises UsageError for the head of a target of another width."""
    joined = named["fc.weight"].shape[-1] if "fc.weight" in named else 0
    expected = (
        2 * target.hidden_size
        if head.joins_embedding
        else (len(head.feature_layers) * target.hidden_size)
    )
    if joined and joined != expected:
        raise UsageError(
            f"{head.path} is a head for another target: it reads {joined} numbers of a token, this "
            f"target gives {expected}",
            remedy="Use the head with the model that it was trained for.",
        )


def _require_shapes(
    head: EagleHead, named: Mapping[str, StoredTensor], scored: int, target: ModelConfig
) -> None:
    """Raises ModelFileError for a tensor that is missing or of another shape."""
    shapes = expected_shapes(head, scored)
    optional = _optional_shapes(head, scored, target)
    for name in [*shapes, *named]:
        expected = shapes.get(name) or optional.get(name)
        if expected is None:
            raise UnsupportedModelError(
                f"{head.path} has a tensor {name}, which a head of the kind {head.kind} has not",
                remedy="Use a head of a kind that docs/drafters.md lists.",
            )
        if name not in named or named[name].shape != expected:
            found = f"has the shape {list(named[name].shape)}" if name in named else "is missing"
            raise ModelFileError(
                f"{head.path}: tensor {name} {found}, expected {list(expected)}",
                remedy="Download the head again, or use it with its own target.",
            )


def expected_shapes(head: EagleHead, scored: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors that every such head has."""
    config, hidden = head.config, head.config.hidden_size
    joined = 2 * hidden if head.joins_embedding else len(head.feature_layers) * head.feature_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, joined)}
    for layer in range(config.num_layers):
        read = 2 * hidden if layer == 0 and not head.joins_embedding else hidden
        own = {
            "q.weight": (config.query_size, read),
            "k.weight": (config.kv_size, read),
            "v.weight": (config.kv_size, read),
            "o.weight": (hidden, config.query_size),
            "gate.weight": (config.intermediate_size, hidden),
            "up.weight": (config.intermediate_size, hidden),
            "down.weight": (hidden, config.intermediate_size),
            "post_norm": (hidden,),
        }
        if not head.joins_embedding:
            own["input_norm"] = (hidden,)
            if layer == 0:
                own["hidden_norm"] = (hidden,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    if not head.joins_embedding:
        shapes["norm"] = (hidden,)
    return shapes


def _optional_shapes(
    head: EagleHead, scored: int, target: ModelConfig
) -> dict[str, tuple[int, ...]]:
    config, hidden = head.config, head.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.bias": (hidden,),
        "embed": (target.vocab_size, hidden),
        "head": (scored, hidden),
        "fc_norm": (len(head.feature_layers) * head.feature_size,),
    }
    for index in range(len(head.feature_layers)):
        shapes[f"feature_norm.{index}"] = (head.feature_size,)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        shapes |= {prefix + f"{name}_norm": (config.head_dim,) for name in "qk"}
        shapes[prefix + "q.bias"] = (config.query_size,)
        shapes |= {prefix + f"{name}.bias": (config.kv_size,) for name in "kv"}
        if head.joins_embedding and layer:
            shapes[prefix + "input_norm"] = (hidden,)
    return shapes


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _count(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise ModelFileError(
            f"{path}: config.json has no usable {name}", remedy="Download the head again."
        )
    return value
