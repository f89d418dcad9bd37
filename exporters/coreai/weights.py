"""Store matrices in a Core AI program as float32, or as blocks of integers with a scale each.

All functions add the same constants, and the program stores equal ones once. Core AI on Linux
dequantizes blocks in every pass, those of transposed matrices in twice the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from coreai.authoring import (
    Value,
    blockwise_shift_scale,
    broadcasting_mul,
    cast,
    expand_dims,
    gather_nd,
    reshape,
    transpose,
)
from coreai.authoring.constant import constant

from edge_spec.exporters.block_quantize import quantize_stored
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.coreai.private import constant_of_4_bits
from edge_spec.exporters.requests import BLOCK_SIZE

HEAD_BITS = 8  # of embedding and head, where few bits cost most


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A matrix [rows, columns] of `bits` bits: levels int8 [rows, columns], around 0, and scales
    float32 [rows, columns / BLOCK_SIZE]."""

    bits: int
    levels: np.ndarray
    scales: np.ndarray


class CoreAiWeights:
    """Read a checkpoint, and quantize each matrix once. bits: of the layers' matrices, in blocks;
    None: all matrices are float32."""

    def __init__(self, checkpoint: StoredCheckpoint, bits: int | None) -> None:
        self._checkpoint, self._bits = checkpoint, bits
        self._stored: dict[str, _Blocks] = {}

    def vector(self, name: str) -> Value:
        return constant(self._checkpoint.float32(name))

    def matrix(self, name: str, is_head: bool = False) -> Value:
        """Return the matrix transposed, float32 [in, out]."""
        if self._bits is None:
            return constant(np.ascontiguousarray(self._checkpoint.float32(name).T))
        found = self._blocks(name, HEAD_BITS if is_head else self._bits)
        store = constant_of_4_bits if found.bits == 4 else constant
        zeros = np.zeros_like(found.scales)
        middle = store(zeros.astype(np.int8))
        levels, scales = store(found.levels), constant(found.scales)
        matrix = blockwise_shift_scale(levels, scales, middle, constant(zeros))
        return transpose(matrix, np.array([1, 0], np.uint32))

    def picked_rows(self, name: str, ids: Value, num_ids: int) -> Value:
        """Return the rows of an embedding that `ids` [1, num_ids] name, [1, num_ids, columns]. Only
        these are dequantized."""
        at = expand_dims(ids, np.array([2], np.int32))
        if self._bits is None:
            return gather_nd(constant(self._checkpoint.float32(name)), at)
        found = self._blocks(name, HEAD_BITS)
        shape = (1, num_ids, found.scales.shape[1], BLOCK_SIZE)
        levels = cast(gather_nd(constant(found.levels), at), np.float32)
        scales = expand_dims(gather_nd(constant(found.scales), at), np.array([3], np.int32))
        values = broadcasting_mul(reshape(levels, np.array(shape, np.int32)), scales)
        return reshape(values, np.array([1, num_ids, found.levels.shape[1]], np.int32))

    def _blocks(self, name: str, bits: int) -> _Blocks:
        """Return symmetric blocks. GGUF's Q4_0 and Q8_0 are kept bit for bit."""
        if name not in self._stored:
            found = quantize_stored([self._checkpoint.tensors[name]], bits, symmetric=True)
            levels = (found.levels().astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
            self._stored[name] = _Blocks(bits, levels, found.scales)
        return self._stored[name]
