"""Block quantization, packed in the layout of onnxruntime's MatMulNBits.

A block of `block_size` neighbouring weights of one row shares a float32 scale s and an integer
zero point z; a weight is s * (q - z). Without zero points z is 2 ** (bits - 1). (Float zero
points would carry Q4_1 over exactly, but make the CPU kernel 160 times slower.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.exporters.stored_tensor import StoredTensor, on_all_cores

# Of the weights that are worked on at once by one thread: about ten times 16 MB of temporaries.
_SLICE_WEIGHTS = 1 << 22


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

    @classmethod
    def of(
        cls, levels: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int, columns: int
    ) -> BlockQuantized:
        """levels: uint8 [rows, blocks, block_size]; scales, zeros: [rows, blocks]."""
        has_zeros = not (zeros == 1 << (bits - 1)).all()
        return cls(
            bits=bits,
            block_size=levels.shape[-1],
            columns=columns,
            packed=_pack(levels, bits),
            scales=np.ascontiguousarray(scales),
            zero_points=_pack(zeros, bits) if has_zeros else None,
        )

    def rows(self, rows: slice) -> BlockQuantized:
        zeros = None if self.zero_points is None else self.zero_points[rows]
        return replace(self, packed=self.packed[rows], scales=self.scales[rows], zero_points=zeros)

    def stated_zero_points(self) -> np.ndarray:
        """Returns zero points where there are none, too."""
        if self.zero_points is not None:
            return self.zero_points
        middle = np.full(self.scales.shape, 1 << (self.bits - 1), np.uint8)
        return _pack(middle, self.bits)

    def levels(self) -> np.ndarray:
        """The integers, uint8 [rows, blocks * block_size]."""
        return _unpack(self.packed, self.bits).reshape(len(self.packed), -1)


def from_q4_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Carries GGUF Q4_0 rows over bit for bit. stored: uint8 [rows, blocks * 18].

    A Q4_0 block is a float16 scale and 16 bytes; byte i holds weight i below and i + 16 above.
    """
    blocks = np.ascontiguousarray(stored).view("<u2").reshape(len(stored), -1, 9)
    pairs = blocks[..., 1:]  # two bytes at a time: weights i, i + 16, i + 1 and i + 17
    packed = np.empty((*blocks.shape[:2], 16), np.uint8)
    packed[..., :8] = (pairs & 15) | (pairs >> 4 & 0xF0)
    packed[..., 8:] = (pairs >> 4 & 15) | (pairs >> 8 & 0xF0)
    scales = blocks[..., 0].view("<f2").astype(np.float32)
    return BlockQuantized(4, 32, columns, packed, scales, None)


def from_q8_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Carries GGUF Q8_0 rows over bit for bit. stored: uint8 [rows, blocks * 34]."""
    blocks = stored.reshape(len(stored), -1, 34)
    values = blocks[..., 2:] ^ 0x80  # two's complement to an offset of 128
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
    return BlockQuantized(8, 32, columns, values, scales, None)


def is_carried(stored: Sequence[StoredTensor], bits: int, block_size: int) -> bool:
    """Returns whether their file has them in this form."""
    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    return block_size == 32 and all(tensor.kind == kind for tensor in stored)


def carried(stored: Sequence[StoredTensor], bits: int, block_size: int) -> BlockQuantized | None:
    """Tensors of the same columns, above each other, where their file has them in this form."""
    if not is_carried(stored, bits, block_size):
        return None
    return quantize_stored(stored, bits, block_size)


def quantize_stored(
    stored: Sequence[StoredTensor],
    bits: int,
    block_size: int,
    importance: np.ndarray | None = None,
    correction: np.ndarray | None = None,
) -> BlockQuantized:
    """Tensors of the same columns, above each other: bit for bit where their file has them in this
    form, else as `quantize` finds them, multiplied with `correction` [columns, columns] before.

    Reads and works in slices of rows, on all cores.
    """
    columns = stored[0].shape[1]
    carry = None
    if is_carried(stored, bits, block_size):
        carry = from_q4_0 if bits == 4 else from_q8_0

    def made(part: StoredTensor) -> BlockQuantized:
        if carry is not None:
            return carry(part.stored_rows(), columns)
        weights = part.float32()
        if correction is not None:
            weights = weights @ correction
        return quantize(weights, bits, block_size, importance=importance)

    step = max(1, _SLICE_WEIGHTS // columns)
    parts = [
        tensor.rows(slice(start, start + step))
        for tensor in stored
        for start in range(0, tensor.shape[0], step)
    ]
    return joined(on_all_cores(made, parts))


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
    step = max(1, _SLICE_WEIGHTS // columns)
    found = [
        _best_blocks(np.pad(weights[start : start + step], padding), counts, bits, symmetric)
        for start in range(0, rows, step)
    ]
    levels, scales, zeros = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return BlockQuantized.of(
        levels.reshape(rows, blocks, block_size),
        scales.reshape(rows, blocks),
        zeros.reshape(rows, blocks),
        bits,
        columns,
    )


def joined(parts: Sequence[BlockQuantized]) -> BlockQuantized:
    """Matrices of the same form above each other."""
    first = parts[0]
    middle = 1 << (first.bits - 1)
    zeros: np.ndarray | None = None
    if any(part.zero_points is not None for part in parts):
        none = _pack(np.full(first.scales.shape[1:], middle, np.uint8), first.bits)
        zeros = np.concatenate(
            [
                np.tile(none, (len(part.packed), 1))
                if part.zero_points is None
                else part.zero_points
                for part in parts
            ]
        )
    return replace(
        first,
        packed=np.concatenate([part.packed for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zero_points=zeros,
    )


def in_turns(parts: Sequence[BlockQuantized]) -> BlockQuantized:
    """Matrices of the same form and size, the first row of each before the second ones."""
    whole = joined(parts)
    order = np.arange(len(whole.packed)).reshape(len(parts), -1).T.ravel()
    zeros = None if whole.zero_points is None else whole.zero_points[order]
    packed, scales = whole.packed[order], whole.scales[order]
    return replace(whole, packed=packed, scales=scales, zero_points=zeros)


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
_RANGE_CUTS = {4: (1.0, 0.92, 0.84), 8: (1.0,)}


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
