"""Blocks of integers: never worse than plain rounding, zero points only where they pay."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from edge_spec.exporters.block_quantize import BlockQuantized, from_q4_0, from_q8_0, quantize

ROWS, COLUMNS = 24, 200  # the last block of each size is padded
SHAPES = ("normal", "uniform", "heavy", "positive", "shifted", "sparse")


def weights(shape: str) -> np.ndarray:
    random = np.random.RandomState(0)
    normal = random.standard_normal((ROWS, COLUMNS))
    values = {
        "normal": normal,
        "uniform": random.uniform(-1, 1, normal.shape),
        "heavy": normal**3,
        "positive": np.abs(normal) + 0.5,
        "shifted": normal - 1.5,
        "sparse": normal * (random.uniform(0, 1, normal.shape) < 0.1),
    }[shape]
    return values.astype(np.float32)


def in_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """[rows, blocks, block_size], padded with zeros."""
    padding = -values.shape[1] % block_size
    return np.pad(values, ((0, 0), (0, padding))).reshape(len(values), -1, block_size)


def errors(found: np.ndarray, values: np.ndarray, block_size: int) -> np.ndarray:
    """Squared, of each block."""
    return (in_blocks(found - values, block_size).astype(np.float64) ** 2).sum(axis=-1)


def symmetric(values: np.ndarray, bits: int, block_size: int, fit: bool = False) -> np.ndarray:
    """Round to nearest, the extreme at -middle, as Q4_0 does; `fit` then fits the scale."""
    blocks = in_blocks(values, block_size).astype(np.float64)
    middle = 2 ** (bits - 1)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scale = extreme / -middle
    levels = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -middle, middle - 1)
    if fit:
        norm = (levels**2).sum(-1, keepdims=True)
        scale = (levels * blocks).sum(-1, keepdims=True) / np.maximum(norm, 1)
    return (levels * scale).reshape(len(values), -1)[:, : values.shape[1]]


def zero_points(quantized: BlockQuantized) -> np.ndarray:
    """[rows, blocks]."""
    rows, blocks = quantized.scales.shape
    packed = quantized.zero_points
    if packed is None:
        return np.full((rows, blocks), 2 ** (quantized.bits - 1))
    if quantized.bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :blocks]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_block_is_worse_than_rounded_to_nearest(shape: str, block_size: int, bits: int) -> None:
    values = weights(shape)
    found = quantize(values, bits, block_size).dequantize()
    assert found.shape == values.shape
    assert found.dtype == np.float32
    plain = errors(symmetric(values, bits, block_size), values, block_size)
    assert (errors(found, values, block_size) <= plain * (1 + 1e-4) + 1e-10).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_point_is_there_only_where_it_lowers_the_error(shape: str, bits: int) -> None:
    values = weights(shape)
    quantized = quantize(values, bits, 32)
    error = errors(quantized.dequantize(), values, 32)
    without = errors(symmetric(values, bits, 32, fit=True), values, 32)
    moved = zero_points(quantized) != 2 ** (bits - 1)
    assert (error[moved] < without[moved]).all()
    assert (error <= without * (1 + 1e-4) + 1e-10).all()
    if shape == "positive":  # half of a symmetric grid would lie idle
        assert moved.all()
        assert error.sum() < 0.5 * without.sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_what_lies_on_a_symmetric_grid_is_kept_without_zero_points(bits: int) -> None:
    middle = 2 ** (bits - 1)
    levels = np.random.RandomState(0).randint(-middle, middle, (8, 64))
    levels[:, ::32] = -middle  # the extreme of each block
    values = (levels * 0.125).astype(np.float32)
    quantized = quantize(values, bits, 32)
    assert quantized.zero_points is None
    np.testing.assert_allclose(quantized.dequantize(), values, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30])
def test_the_smallest_and_the_largest_weights_stay_finite(scale: float, bits: int) -> None:
    with np.errstate(under="ignore"):
        values = weights("normal") * np.float32(scale)
    found = quantize(values, bits, 32).dequantize()
    assert np.isfinite(found).all()
    assert np.abs(found - values).max() <= np.abs(values).max()
    assert scale != 0 or not found.any()


def test_an_empty_block_beside_full_ones_is_zero() -> None:
    values = weights("shifted")
    values[3, 32:64] = 0
    assert not quantize(values, 4, 32).dequantize()[3, 32:64].any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_counts_more_is_nearer(symmetric: bool) -> None:
    """The error of a product with inputs of very different sizes."""
    values = weights("normal")
    importance = np.exp(np.random.RandomState(1).standard_normal(COLUMNS) * 2)

    def cost(found: BlockQuantized) -> float:
        return float((((found.dequantize() - values) ** 2) * importance).sum())

    plain = quantize(values, 4, 32, symmetric)
    weighted = quantize(values, 4, 32, symmetric, importance)
    assert cost(weighted) < 0.9 * cost(plain)
    alike = quantize(values, 4, 32, symmetric, np.full(COLUMNS, 7.0))
    assert np.array_equal(alike.dequantize(), plain.dequantize())


def test_symmetric_blocks_have_no_zero_points() -> None:
    values = weights("shifted")
    assert quantize(values, 4, 32).zero_points is not None
    found = quantize(values, 4, 32, symmetric=True)
    assert found.zero_points is None
    rounded = symmetric(values, 4, 32)
    assert (errors(found.dequantize(), values, 32) <= errors(rounded, values, 32) + 1e-9).all()


def test_rows_beyond_a_slice_are_quantized_alike() -> None:
    values = np.random.RandomState(0).standard_normal((5000, 32)).astype(np.float32)
    whole = quantize(values, 4, 32).dequantize()
    parts = [quantize(values[start : start + 1000], 4, 32) for start in range(0, 5000, 1000)]
    np.testing.assert_array_equal(whole, np.concatenate([part.dequantize() for part in parts]))


@pytest.mark.parametrize(("kind", "carry"), [(Kind.Q4_0, from_q4_0), (Kind.Q8_0, from_q8_0)])
def test_stored_blocks_are_carried_over_bit_for_bit(kind: Kind, carry) -> None:  # type: ignore[no-untyped-def]
    stored = quants.quantize(weights("heavy")[:, :192], kind)
    carried = carry(stored, 192)
    assert carried.zero_points is None
    np.testing.assert_array_equal(carried.dequantize(), quants.dequantize(stored, kind))


@pytest.mark.parametrize(("kind", "carry"), [(Kind.Q4_0, from_q4_0), (Kind.Q8_0, from_q8_0)])
def test_every_stored_byte_is_carried_over(kind: Kind, carry) -> None:  # type: ignore[no-untyped-def]
    """All values of a byte, -128 included, which gguf's own quantizer never writes."""
    _, block_bytes = quants.GGML_QUANT_SIZES[kind]
    stored = np.resize(np.arange(256, dtype=np.uint8), (37, 4, block_bytes))
    stored[..., :2] = np.array([0.375], np.float16).view(np.uint8)
    stored = stored.reshape(37, -1)
    np.testing.assert_array_equal(carry(stored, 128).dequantize(), quants.dequantize(stored, kind))
