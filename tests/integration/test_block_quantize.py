"""Blocks of integers: never worse than plain rounding, zero points only where they pay."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from edge_spec.exporters.block_quantize import (
    from_q4_0,
    from_q8_0,
    in_turns,
    joined,
    quantize,
)

ROWS, COLUMNS = 24, 200  # the last block is padded
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


def in_blocks(values: np.ndarray) -> np.ndarray:
    """[rows, blocks, 32], padded with zeros."""
    padding = -values.shape[1] % 32
    return np.pad(values, ((0, 0), (0, padding))).reshape(len(values), -1, 32)


def errors(found: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Squared, of each block."""
    return (in_blocks(found - values).astype(np.float64) ** 2).sum(axis=-1)


def symmetric(values: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest, the extreme at -middle, as Q4_0 does."""
    blocks = in_blocks(values).astype(np.float64)
    middle = 2 ** (bits - 1)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scale = extreme / -middle
    levels = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -middle, middle - 1)
    return (levels * scale).reshape(len(values), -1)[:, : values.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_block_is_worse_than_rounded_to_nearest(shape: str, bits: int) -> None:
    values = weights(shape)
    found = quantize(values, bits).dequantize()
    assert found.shape == values.shape
    assert found.dtype == np.float32
    plain = errors(symmetric(values, bits), values)
    assert (errors(found, values) <= plain * (1 + 1e-4) + 1e-10).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30])
def test_the_smallest_and_the_largest_weights_stay_finite(scale: float, bits: int) -> None:
    with np.errstate(under="ignore"):
        values = weights("normal") * np.float32(scale)
    found = quantize(values, bits).dequantize()
    assert np.isfinite(found).all()
    assert np.abs(found - values).max() <= np.abs(values).max()
    assert scale != 0 or not found.any()


@pytest.mark.parametrize(("kind", "carry"), [(Kind.Q4_0, from_q4_0), (Kind.Q8_0, from_q8_0)])
def test_every_stored_byte_is_carried_over(kind: Kind, carry) -> None:  # type: ignore[no-untyped-def]
    """All values of a byte, -128 included, which gguf's own quantizer never writes."""
    _, block_bytes = quants.GGML_QUANT_SIZES[kind]
    stored = np.resize(np.arange(256, dtype=np.uint8), (37, 4, block_bytes))
    stored[..., :2] = np.array([0.375], np.float16).view(np.uint8)
    stored = stored.reshape(37, -1)
    np.testing.assert_array_equal(carry(stored, 128).dequantize(), quants.dequantize(stored, kind))


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_above_each_other_and_in_turns_are_what_each_is(bits: int) -> None:
    """One with zero points, one without."""
    with_zeros = quantize(weights("positive"), bits)
    symmetric_blocks = quantize(weights("normal"), bits, symmetric=True)
    assert with_zeros.zero_points is not None
    assert symmetric_blocks.zero_points is None
    parts = [symmetric_blocks, with_zeros]
    values = [part.dequantize() for part in parts]
    np.testing.assert_array_equal(joined(parts).dequantize(), np.concatenate(values))
    turns = np.stack(values, axis=1).reshape(-1, COLUMNS)
    np.testing.assert_array_equal(in_turns(parts).dequantize(), turns)
