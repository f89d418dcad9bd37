"""DFlash heads as z-lab publishes them. Layer ids name layers whose output is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.heads.eagle import (
    PADDING,
    count,
    head_config,
    head_window,
    mapping,
    unusable,
)
from edge_spec.exporters.heads.eagle_tensors import (
    Shapes,
    layer_shapes,
    named_as_ours,
    published_name,
    require_exactly,
)
from edge_spec.exporters.heads.head_files import HeadFiles, StoredTensors

_CONTEXT_NORM = "hidden_norm.weight"
_MAX_BLOCK = 64  # tokens
_OWN_TARGET = "Use the head with the model that it was trained for."


def dflash_head(files: HeadFiles) -> DFlashHead:
    """Raises as `open_head` does."""
    path, values, tensors, target = files.path, files.values, files.tensors, files.target
    stated = mapping(values, "dflash_config")
    named = named_as_ours(path, {n: t for n, t in tensors.items() if n != _CONTEXT_NORM})
    if _CONTEXT_NORM in tensors:
        named["context_norm"] = tensors[_CONTEXT_NORM]
    config = head_config(path, values, named, target, "dflash")
    if head_window(path, values) is not None:
        raise UnsupportedModelError(
            f"{path} has a sliding window, which is not computed for DFlash heads",
            remedy="Use another head.",
        )
    layers = _feature_layers(path, values, stated, target)
    size = count(path, values, "block_size")
    if not 2 <= size <= _MAX_BLOCK:
        raise unusable(path, f"usable block_size: it is {size}, expected 2 to {_MAX_BLOCK}")
    head = DFlashHead(
        path=path,
        config=config,
        feature_layers=layers,
        feature_size=target.hidden_size,
        tensors=StoredTensors(named) if files.has_weights else {},
        block_size=size,
        mask_token=_mask_token(path, stated, target),
    )
    _require_target(head, values, target)
    require_exactly(path, named, _shapes(head), _published, "which no DFlash head has")
    return head


def _feature_layers(
    path: Path, values: Mapping[str, Any], stated: Mapping[str, Any], target: ModelConfig
) -> tuple[int, ...]:
    ids, layers = stated.get("target_layer_ids"), values.get("num_target_layers")
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ModelFileError(f"{path} names no layers", remedy="Download the head again.")
    told = isinstance(layers, int) and layers != target.num_layers
    # The output of the last layer is no input of any: features have it after the final norm alone.
    if told or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < target.num_layers - 1:
        raise UsageError(
            f"{path} drafts from the outputs of the layers {ids} of {layers or 'some'} layers, "
            f"which a target of {target.num_layers} layers has not",
            remedy=_OWN_TARGET,
        )
    return tuple(each + 1 for each in ids)


def _mask_token(path: Path, stated: Mapping[str, Any], target: ModelConfig) -> int:
    token = stated.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool):
        raise unusable(path, "usable mask_token_id")
    if not 0 <= token < target.vocab_size:
        raise UsageError(
            f"{path}: its mask token {token} is beyond the target's vocabulary of "
            f"{target.vocab_size}",
            remedy=_OWN_TARGET,
        )
    return token


def _require_target(head: DFlashHead, values: Mapping[str, Any], target: ModelConfig) -> None:
    """It shares the target's tables. Raises UsageError where they are another's."""
    width, tokens, told = head.config.hidden_size, values.get("vocab_size"), None
    if width != target.hidden_size:
        told = f"it shares tables of {width} numbers a row, this target's have {target.hidden_size}"
    elif isinstance(tokens, int) and abs(tokens - target.vocab_size) > PADDING:
        told = f"its vocabulary has {tokens} tokens, this target's {target.vocab_size}"
    if told is not None:
        raise UsageError(f"{head.path} is a head for another target: {told}", remedy=_OWN_TARGET)


def _published(name: str) -> str:
    return _CONTEXT_NORM if name == "context_norm" else published_name(name)


def _shapes(head: DFlashHead) -> Shapes:
    config, hidden = head.config, head.config.hidden_size
    joined = len(head.feature_layers) * head.feature_size
    shapes: Shapes = {
        "fc.weight": (hidden, joined),
        "context_norm": (hidden,),
        "norm": (hidden,),
    }
    for layer in range(config.num_layers):
        norms = {
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
            "input_norm": (hidden,),
        }
        own = {**layer_shapes(config, hidden), **norms}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes
