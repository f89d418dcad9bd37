"""Block quantization in the layout of onnxruntime's MatMulNBits.

A block of `block_size` neighbouring weights of one row shares a float32 scale s and an integer
zero point z; a weight is s * (q - z). Without zero points z is 2 ** (bits - 1). (Float zero
points would carry Q4_1 over exactly, but make the CPU kernel 160 times slower.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        values = _unpack(self.packed, self.bits).reshape(rows, blocks, self.block_size)
        zeros: np.ndarray | float = 2.0 ** (self.bits - 1)
        if self.zero_points is not None:
            zeros = _unpack(self.zero_points, self.bits)[:, :blocks, None].astype(np.float32)
        floats = (values - zeros) * self.scales[..., None]
        return floats.astype(np.float32).reshape(rows, -1)[:, : self.columns]


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


def quantize(weights: np.ndarray, bits: int, block_size: int) -> BlockQuantized:
    """The nearest found to `weights` [rows, columns] in squared error.

    Zero points are kept only where they lower the total error against symmetric blocks.
    """
    rows, columns = weights.shape
    blocks = -(-columns // block_size)
    values = np.empty((rows, blocks, block_size), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zeros = np.empty((rows, blocks), np.uint8)
    for start in range(0, rows, _SLICE_ROWS):
        part = weights[start : start + _SLICE_ROWS]
        padded = np.pad(part, ((0, 0), (0, blocks * block_size - columns)))
        found = _best_blocks(padded.reshape(-1, block_size), bits)
        for array, values_found in zip((values, scales, zeros), found, strict=True):
            array[start : start + _SLICE_ROWS] = values_found.reshape(
                len(part), blocks, -1
            ).reshape(array[start : start + _SLICE_ROWS].shape)
    symmetric = bool((zeros == 1 << (bits - 1)).all())
    return BlockQuantized(
        bits,
        block_size,
        columns,
        _pack(values, bits),
        scales,
        None if symmetric else _pack(zeros, bits),
    )


def _best_blocks(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values [n, size], scales [n] and zero points [n] for blocks [n, size]."""
    top = np.float32((1 << bits) - 1)
    low = np.minimum(weights.min(axis=1), 0)
    high = np.maximum(weights.max(axis=1), 0)
    extreme = np.where(-low > high, low, high)
    # The candidates: the whole range, the range cut a little at both ends (rounding the few
    # extremes harder pays for a finer grid), and the symmetric grid with its extreme at -2^(b-1).
    starts = [((high - low) * np.float32(cut) / top, None) for cut in _CUTS[bits]]
    starts.append((extreme / -np.float32(1 << (bits - 1)), np.float32(1 << (bits - 1))))
    best_error = np.full(len(weights), np.inf, np.float32)
    values = np.zeros(weights.shape, np.uint8)
    scales = np.ones(len(weights), np.float32)
    zeros = np.full(len(weights), 1 << (bits - 1), np.uint8)
    for scale, fixed_zero in starts:
        scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
        middle = (low + high) / 2
        zero = (
            np.clip(np.rint(top / 2 - middle / scale), 0, top)
            if fixed_zero is None
            else np.full_like(scale, fixed_zero)
        )
        levels = np.rint(weights / scale[:, None])
        levels += zero[:, None]
        np.clip(levels, 0, top, out=levels)
        centred = levels - zero[:, None]
        # The best scale for these levels, by least squares.
        dot = np.einsum("ij,ij->i", weights, centred)
        norm = np.einsum("ij,ij->i", centred, centred)
        scale = np.where(norm > 0, dot / np.maximum(norm, 1), scale).astype(np.float32)
        centred *= scale[:, None]
        centred -= weights
        error = np.einsum("ij,ij->i", centred, centred)
        better = error < best_error
        best_error[better] = error[better]
        values[better] = levels[better]
        scales[better] = scale[better]
        zeros[better] = zero[better]
    return values, scales, zeros


_CUTS = {4: (1.0, 0.92, 0.84), 8: (1.0,)}


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
