"""A program's constants: what compressed weights stand for, as Core ML expands them when it loads
a model, and arrays that several functions share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types


class Constants:
    """Holds the constants that functions of one program share, equal ones once."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def held(self, value: Any) -> Any:
        """Arrays widened; others as they are."""
        if not isinstance(value, np.ndarray):
            return value
        return self._once(_digest(value), lambda: widened(value))

    def expanded(self, operation: Any) -> np.ndarray:
        """The weights that a constexpr operation of pymil stands for."""
        parts = {name: self._part(var) for name, var in operation.inputs.items() if var is not None}
        key = [operation.op_type, *(f"{name} {_digest(part)}" for name, part in parts.items())]
        return self._once(" ".join(key), lambda: self._expand(operation, parts))

    def _part(self, var: Any) -> np.ndarray:
        return np.asarray(self.expanded(var.op) if var.val is None else var.val)

    def _expand(self, operation: Any, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        weights = CONSTEXPR[operation.op_type](**parts)
        return rounded(weights) if is_half(operation.outputs[0]) else weights

    def _once(self, key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._held:
            array = make()
            array.flags.writeable = False
            self._held[key] = array
        return self._held[key]


def is_half(var: Any) -> bool:
    """Returns whether a pymil Var is of float16."""
    return bool(var.dtype == types.fp16)


def widened(array: np.ndarray) -> np.ndarray:
    """A copy in float32, int32, bool, or as it is for anything else."""
    if array.dtype == np.bool_:
        return array.copy()
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    return array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array


def rounded(array: np.ndarray) -> np.ndarray:
    """Float32 numbers that float16 has; too large ones become infinite."""
    return array.astype(np.float16).astype(np.float32)


def blockwise_shift_scale(
    data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None
) -> np.ndarray:
    """scale * (data - offset) in float32, each number with its block's scale and offset.

    Along each axis, a block is as long as data's size over scale's.
    """
    blocks, single = _blocks(data.shape, scale.shape)
    values = data.astype(np.float32).reshape(blocks)
    if offset is not None:
        values -= offset.astype(np.float32).reshape(single)
    values *= scale.astype(np.float32).reshape(single)
    return values.reshape(data.shape)


def lut_to_dense(
    indices: np.ndarray, lut: np.ndarray, vector_axis: np.ndarray | None = None
) -> np.ndarray:
    """Each index replaced by its entry of its group's table.

    lut: [groups of each axis of indices.., entries, 1]. Raises ValueError for tables of vectors.
    """
    *groups, entries, vector_size = lut.shape
    if vector_size != 1:
        raise ValueError(f"a table of vectors of {vector_size}")
    blocks, single = _blocks(indices.shape, tuple(groups))
    first = np.arange(math.prod(groups), dtype=np.int32) * np.int32(entries)
    entry = indices.astype(np.int32).reshape(blocks) + first.reshape(single)
    return lut.astype(np.float32).ravel()[entry].reshape(indices.shape)


CONSTEXPR: Mapping[str, Callable[..., np.ndarray]] = {
    "constexpr_blockwise_shift_scale": blockwise_shift_scale,
    "constexpr_lut_to_dense": lut_to_dense,
}


def _blocks(shape: tuple[int, ...], groups: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns how to reshape an array of `shape` and what there is of each group, so that they go
    together: [groups, block, groups, block, ..] and [groups, 1, groups, 1, ..]."""
    pairs = list(zip(shape, groups, strict=True))
    blocks = [part for size, count in pairs for part in (count, size // count)]
    return blocks, [part for count in groups for part in (count, 1)]


def _digest(array: np.ndarray) -> str:
    content = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    return f"{array.dtype} {array.shape} {content}"
