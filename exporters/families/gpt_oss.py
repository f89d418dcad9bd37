"""gpt-oss: experts in MXFP4, attention sinks, biases everywhere (OpenAI 2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import SWISH_SLOPE, Experts, LayerKind
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import (
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    SLIDING,
    StatedConfig,
    of_types,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

_BLOCK, _BLOCK_BYTES = 32, 16  # weights that share a scale, and what they take without it
_BLOCKS, _SCALES = "_blocks", "_scales"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_LIMIT = 7.0  # of gate and up, which GGUF does not state
_Rows = slice | np.ndarray


def _of_config(stated: StatedConfig) -> Fields:
    values, rope = stated.values, stated.rope()
    if float(values["swiglu_alpha"]) != SWISH_SLOPE:
        raise stated.refuse(f"a slope of {values['swiglu_alpha']} in its experts")
    kinds = {SLIDING: LayerKind(rope, int(values["sliding_window"])), FULL: LayerKind(rope)}
    return {
        **stated.mixture(Experts(biases=True, clamp=float(values["swiglu_limit"]))),
        "attention_sinks": True,
        **of_types(kinds, stated.layer_types(2)),
    }


def _of_experts(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Reads all experts at once: MXFP4's blocks and scales, or transposed matrices; rows of
    gate and up stand in turns."""
    found = {}
    for name, tensor in stored.items():
        prefix, is_expert, part = name.partition(".mlp.experts.")
        whole = part.removesuffix(_BLOCKS).removesuffix("_bias")
        if not is_expert or whole not in _PARTS:
            if not part.endswith(_SCALES):  # those are read with their blocks
                found[name] = tensor
            continue
        _require_experts(name, tensor, config)
        scales = stored.get(f"{prefix}{is_expert}{whole}{_SCALES}")
        for expert in range(config.num_experts):
            for own, read in _parts_of(name, tensor, scales, whole, expert):
                found[f"{prefix}{is_expert}{expert}.{own}"] = read
    return found


def _parts_of(
    name: str, tensor: StoredTensor, scales: StoredTensor | None, whole: str, expert: int
) -> Iterator[tuple[str, StoredTensor]]:
    """The name and the tensor of what one expert has of a whole."""
    parts, data = _PARTS[whole], tensor.data[expert]
    for turn, part in enumerate(parts):
        every = slice(turn, None, len(parts))
        if name.endswith("_bias"):
            items = data.reshape(tensor.shape[1], -1)[every]
            shape = (len(items),)
            yield (
                f"{part}.bias",
                StoredTensor(shape, tensor.kind, np.ascontiguousarray(items).ravel()),
            )
        elif name.endswith(_BLOCKS):
            own = None if scales is None else scales.data[expert][every]
            yield f"{part}.weight", _in_blocks(name, data[every], own)
        else:
            columns, rows = tensor.shape[1:]
            items = data.reshape(columns, rows, -1)[:, every]
            yield f"{part}.weight", _made((items.shape[1], columns), tensor.kind, items, _turned)


def _require_experts(name: str, tensor: StoredTensor, config: ModelConfig) -> None:
    sizes = 2 if name.endswith("_bias") else 4 if name.endswith(_BLOCKS) else 3
    if len(tensor.shape) != sizes or tensor.shape[0] != config.num_experts:
        raise damaged(
            f"tensor {name} has the shape {list(tensor.shape)}, expected {config.num_experts} "
            "experts"
        )


def _in_blocks(name: str, blocks: np.ndarray, scales: np.ndarray | None) -> StoredTensor:
    """blocks: [rows, blocks, bytes], scales: [rows, blocks]."""
    if scales is None or scales.shape != blocks.shape[:2] or blocks.shape[2] != _BLOCK_BYTES:
        raise damaged(f"tensor {name} has no scale for each block of {_BLOCK_BYTES} bytes")
    shape = (len(blocks), blocks.shape[1] * _BLOCK)
    return _made(shape, GGMLQuantizationType.MXFP4, blocks, partial(_as_ggml, scales))


def _made(
    shape: tuple[int, int],
    kind: GGMLQuantizationType,
    data: np.ndarray,
    read: Callable[[np.ndarray, _Rows], np.ndarray],
) -> StoredTensor:
    return StoredTensor(shape, kind, data, read_rows=partial(read, data))


def _as_ggml(scales: np.ndarray, blocks: np.ndarray, rows: _Rows) -> np.ndarray:
    """Here a byte has two neighbours, there weights that are half of a block apart."""
    stored = blocks[rows]
    values = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:2], _BLOCK)
    low, high = np.split(values, 2, axis=-1)
    packed = np.concatenate([scales[rows][..., None], low | high << 4], axis=-1)
    return packed.reshape(len(packed), -1)


def _turned(items: np.ndarray, rows: _Rows) -> np.ndarray:
    """items: [columns, rows, bytes of one]."""
    turned = np.ascontiguousarray(items[:, rows].swapaxes(0, 1))
    return turned.reshape(len(turned), -1)


GPT_OSS = Family(
    model_types=("gpt_oss",),
    architectures=("gpt-oss",),
    of_config=_of_config,
    defaults={"swiglu_alpha": SWISH_SLOPE, "swiglu_limit": _LIMIT},
    gguf_parts={
        **GGUF_EXPERTS,
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    computes=(EXPERTS,),
    of_tensors=_of_experts,
)
