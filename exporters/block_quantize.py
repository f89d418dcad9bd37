"""Block quantization, packed in the layout of onnxruntime's MatMulNBits.

A block of `block_size` neighbouring weights of one row shares a float32 scale s and an integer
zero point z; a weight is s * (q - z). Without zero points z is 2 ** (bits - 1). (Float zero
points would carry Q4_1 over exactly, but make the CPU kernel 160 times slower.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.exporters.stored_tensor import StoredTensor

_SLICE_ROWS = 4096  # bounds the temporaries of `quantize` to tens of megabytes


@dataclass(frozen=True, eq=False)
class BlockQuantized:
    """A weight matrix [rows, columns] in blocks along the columns, the last one padded."""

    bits: int  # 4 or 8
    block_size: int
    columns: int
    packed: np.ndarray  # uint8 [rows, blocks, block_size * bits / 8], low nibble first
    scales: np.ndarray  # float32 [rows, blocks]
    zero_points: np.ndarray | None  # uint8 [rows, ceil(blocks * bits / 8)]

    def dequantize(self) -> np.ndarray:
        """float32 [rows, columns]."""
        rows, blocks = self.scales.shape
        values = self.levels().reshape(rows, blocks, self.block_size)
        zeros: np.ndarray | float = 2.0 ** (self.bits - 1)
        if self.zero_points is not None:
            zeros = _unpack(self.zero_points, self.bits)[:, :blocks, None].astype(np.float32)
        floats: np.ndarray = (values - zeros) * self.scales[..., None]
        return floats.astype(np.float32).reshape(rows, -1)[:, : self.columns]

    def levels(self) -> np.ndarray:
        """The integers, uint8 [rows, blocks * block_size]."""
        return _unpack(self.packed, self.bits).reshape(len(self.packed), -1)


def from_q4_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Carries GGUF Q4_0 rows over bit for bit. stored: uint8 [rows, blocks * 18].

    A Q4_0 block is a float16 scale and 16 bytes; byte i holds weight i below and i + 16 above.
    """
    blocks = stored.reshape(len(stored), -1, 18)
    nibbles = blocks[..., 2:]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return BlockQuantized(4, 32, columns, _pack(values, 4), _half_scales(blocks), None)


def from_q8_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Carries GGUF Q8_0 rows over bit for bit. stored: uint8 [rows, blocks * 34]."""
    blocks = stored.reshape(len(stored), -1, 34)
    values = blocks[..., 2:] ^ 0x80  # two's complement to an offset of 128
    return BlockQuantized(8, 32, columns, values, _half_scales(blocks), None)


def carried(stored: Sequence[StoredTensor], bits: int, block_size: int) -> BlockQuantized | None:
    """Tensors of the same columns, above each other, where their file has them in this form."""
    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    if block_size != 32 or any(tensor.kind != kind for tensor in stored):
        return None
    rows = np.concatenate([tensor.stored_rows() for tensor in stored])
    carry = from_q4_0 if bits == 4 else from_q8_0
    return carry(rows, stored[0].shape[1])


def quantize(
    weights: np.ndarray,
    bits: int,
    block_size: int,
    symmetric: bool = False,
    importance: np.ndarray | None = None,
) -> BlockQuantized:
    """The nearest found to `weights` [rows, columns] in squared error, in which each column counts
    as much as `importance` [columns] says.

    Zero points are kept only where they lower the total error against symmetric blocks, and never
    where `symmetric` is asked for.
    """
    rows, columns = weights.shape
    blocks = -(-columns // block_size)
    padding = ((0, 0), (0, blocks * block_size - columns))
    counts = np.ones(columns) if importance is None else importance / importance.mean()
    counts = np.pad(counts, padding[1]).astype(np.float32).reshape(blocks, block_size)
    found = [
        _best_blocks(np.pad(weights[start : start + _SLICE_ROWS], padding), counts, bits, symmetric)
        for start in range(0, rows, _SLICE_ROWS)
    ]
    levels, scales, zeros = (np.concatenate(parts) for parts in zip(*found, strict=True))
    zeros = zeros.reshape(rows, blocks)
    return BlockQuantized(
        bits=bits,
        block_size=block_size,
        columns=columns,
        packed=_pack(levels.reshape(rows, blocks, block_size), bits),
        scales=scales.reshape(rows, blocks),
        zero_points=None if (zeros == 1 << (bits - 1)).all() else _pack(zeros, bits),
    )


def _best_blocks(
    weights: np.ndarray, counts: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels uint8 [n, block_size], scales float32 [n] and zero points uint8 [n] of n blocks.

    counts: [blocks of a row, block_size] float32.
    """
    counts = np.tile(counts, (len(weights), 1))
    weights = weights.reshape(counts.shape)
    top, middle = np.float32((1 << bits) - 1), np.float32(1 << (bits - 1))
    low = np.minimum(weights.min(axis=1), 0)
    high = np.maximum(weights.max(axis=1), 0)
    # Symmetric first, so that a zero point has to earn its place: the extreme lies on -middle.
    extreme, centre = np.where(-low > high, low, high), np.full_like(low, middle)
    grids = [(extreme / -middle, centre)]
    for cut in _RANGE_CUTS[bits]:
        if symmetric:
            grids += [(extreme * np.float32(cut) / -middle, centre)]
            continue
        scale = np.where(high > low, (high - low) * np.float32(cut) / top, 1)
        grids.append((scale, np.clip(np.rint((top - (low + high) / scale) / 2), 0, top)))
    levels = np.empty(weights.shape, np.uint8)
    scales, zeros = np.empty_like(low), np.empty(low.shape, np.uint8)
    errors = np.full(low.shape, np.inf, np.float32)
    for scale, zero in grids:
        fitted, scale, error = _fit(weights, counts, np.where(scale == 0, 1, scale), zero, top)
        better = error < errors
        for best, new in ((levels, fitted), (scales, scale), (zeros, zero), (errors, error)):
            best[better] = new[better]
    return levels, scales, zeros


def _fit(
    weights: np.ndarray,
    counts: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    top: np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels on this grid, the least-squares scale for them, and the squared error [n]."""
    levels = weights / scale[:, None]
    np.rint(levels, out=levels)
    levels += zero[:, None]
    np.clip(levels, 0, top, out=levels)
    centred = levels - zero[:, None]
    norm = np.einsum("ij,ij,ij->i", centred, centred, counts)
    dot = np.einsum("ij,ij,ij->i", weights, centred, counts)
    scale = np.where(norm > 0, dot / np.where(norm > 0, norm, 1), scale).astype(np.float32)
    centred *= scale[:, None]
    centred -= weights
    return levels, scale, np.einsum("ij,ij,ij->i", centred, centred, counts)


# The whole range of a block, and at 4 bits also a little less of it: clipping the few extremes
# pays for a finer grid.
_RANGE_CUTS = MappingProxyType({4: (1.0, 0.92, 0.84), 8: (1.0,)})


def _half_scales(blocks: np.ndarray) -> np.ndarray:
    halves = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return halves.astype(np.float32)


def _pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last axis, two 4-bit values a byte with the first one low."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    packed: np.ndarray = values[..., ::2] | values[..., 1::2] << 4
    return packed


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
