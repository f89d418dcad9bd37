"""Products of the kernels for few rows, of every table that this processor runs: what they are, and
that the bits of a row are the same in every table and in every pass that the row is part of."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from fixtures.rows import TYPES, Floats, Matrix, library, tables

BLOCK_VALUES = {name: 256 if name.endswith("K") else 1 if "F" in name else 32 for name in TYPES}
MINIMUM_AT = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}  # byte of a block: a float16
SCALE_AT = {"Q6_K": 208}  # byte 0 in the others


def weights(kind: str, outputs: int, values: int, seed: int = 1) -> NDArray[np.uint8]:
    """Random blocks: any bytes as weights and small scales, of which some are negative."""
    generator = np.random.default_rng(seed)
    scale = generator.standard_normal((outputs, values)).astype(np.float32)
    if kind == "F16":
        return scale.astype(np.float16).view(np.uint8)
    if kind == "F32":
        return scale.view(np.uint8)
    if kind == "BF16":
        return (scale.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size = library().edge_spec_rows_block_bytes(TYPES.index(kind))
    blocks = generator.integers(0, 256, (outputs, values // BLOCK_VALUES[kind], size), np.uint8)
    for at in {SCALE_AT.get(kind, 0), MINIMUM_AT.get(kind, SCALE_AT.get(kind, 0))}:
        number = generator.standard_normal(blocks.shape[:2]) / 50
        blocks[:, :, at : at + 2] = number.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def activations(rows: int, values: int, seed: int = 2) -> Floats:
    generator = np.random.default_rng(seed)
    wild = generator.standard_normal((rows, values)) * generator.lognormal(0, 1, (rows, values))
    return wild.astype(np.float32)


def dequantized(kind: str, source: NDArray[np.uint8]) -> NDArray[np.float64]:
    if kind in ("F16", "F32"):
        return source.view(np.float16 if kind == "F16" else np.float32).astype(np.float64)
    return gguf.dequantize(source, gguf.GGMLQuantizationType[kind]).astype(np.float64)


def magnitudes(kind: str, source: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The size of what a weight is the sum of: its scaled part and its minimum, or d * 2^bits."""
    whole = dequantized(kind, source)
    if kind in MINIMUM_AT:
        size = library().edge_spec_rows_block_bytes(TYPES.index(kind))
        blocks = source.reshape(len(source), -1, size).copy()
        blocks[:, :, MINIMUM_AT[kind] : MINIMUM_AT[kind] + 2] = 0
        scaled = dequantized(kind, blocks.reshape(source.shape))
        return np.abs(scaled) + np.abs(whole - scaled)
    return np.abs(whole)


def rounded(kind: str, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Activations as the kernels take them, and the step between neighbours of each."""
    if BLOCK_VALUES[kind] == 1:
        return x.astype(np.float64), np.zeros(x.shape)
    blocks = x.reshape(len(x), -1, BLOCK_VALUES[kind])
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    step = (largest / np.float32(127)).astype(np.float64)
    return (
        (np.rint(blocks * inverse) * step).reshape(x.shape),
        np.broadcast_to(step, blocks.shape).reshape(x.shape),
    )


def check_close(kind: str, source: NDArray[np.uint8], x: Floats, out: Floats) -> None:
    w, size = dequantized(kind, source), magnitudes(kind, source)
    taken, step = rounded(kind, x)
    # Every addition of a block, its conversion and its products may err by 2^-24 of what is summed,
    # and gguf's dequantized weights, which are float32, by a few of these too.
    additions = 2 * w.shape[1] / max(BLOCK_VALUES[kind], 2) + 8
    bound = additions * 2.0**-24 * (np.abs(taken) @ size.T) + 1e-30
    error = np.abs(out - taken @ w.T)
    assert (error <= bound).all(), (error / bound).max()
    # A value is at most half a step from what stands for it.
    assert (np.abs(out - x.astype(np.float64) @ w.T) <= 0.5001 * step @ np.abs(w).T + bound).all()


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize("kind", TYPES)
def test_is_the_product_of_the_weights_and_the_rounded_activations(kind: str, table: str) -> None:
    source, x = weights(kind, 48, 768), activations(11, 768)
    check_close(kind, source, x, Matrix(table, kind, source).multiply(x))


@pytest.mark.parametrize("kind", TYPES)
def test_every_table_computes_the_same_bits(kind: str) -> None:
    source, x = weights(kind, 40, 1024), activations(8, 1024)
    one, *others = (Matrix(table, kind, source).multiply(x) for table in reversed(tables()))
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_every_pass(kind: str, table: str) -> None:
    x = activations(16, 512)
    matrix = Matrix(table, kind, weights(kind, 24, 512))
    alone = matrix.multiply(x, [1] * 16)
    for widths in ([16], [3, 5, 1, 7], *([width, 16 - width] for width in range(1, 16))):
        together = matrix.multiply(x, widths)
        np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize("kind", TYPES)
def test_rows_that_fill_no_tile_and_few_blocks(kind: str, table: str) -> None:
    for outputs, blocks in ((1, 1), (17, 3), (31, 1), (7, 3)):
        values = blocks * BLOCK_VALUES[kind]
        source, x = weights(kind, outputs, values), activations(3, values)
        matrix = Matrix(table, kind, source)
        # What stands after the outputs of a row is another row's: nothing may be written there.
        check_close(kind, source, x, matrix.multiply(x))
        room = np.full((1, outputs + 64), -1, np.float32)
        matrix.multiply_into(room, x[:1])
        assert (room[0, outputs:] == -1).all()


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize("kind", [kind for kind in TYPES if BLOCK_VALUES[kind] > 1])
def test_weights_and_activations_at_the_ends_of_their_ranges(kind: str, table: str) -> None:
    """Sums of 16 bits, where a table has them, hold the largest products there are."""
    x = np.empty((3, 512), np.float32)
    x[0], x[1], x[2] = 3.0, -3.0, np.where(np.arange(512) % 3, 3.0, -3.0)
    source = weights(kind, 16, 512)
    size = library().edge_spec_rows_block_bytes(TYPES.index(kind))
    blocks = source.reshape(16, -1, size)
    kept = [SCALE_AT.get(kind, 0), MINIMUM_AT.get(kind, SCALE_AT.get(kind, 0))]
    weight_bytes = [at for at in range(size) if not any(k <= at < k + 2 for k in kept)]
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks[:, :, weight_bytes] = byte
        check_close(kind, source, x, Matrix(table, kind, source).multiply(x))


@pytest.mark.parametrize("table", tables())
@pytest.mark.parametrize("kind", TYPES)
def test_zeros_give_zeros_and_what_is_not_finite_stays_in_its_row(kind: str, table: str) -> None:
    matrix = Matrix(table, kind, weights(kind, 32, 512))
    x = activations(6, 512)
    alone = matrix.multiply(x)
    x[1], x[2, 300], x[3, 5], x[4, 5] = 0, np.nan, np.inf, -np.inf
    x[5] = np.where(np.arange(512) % 2, 1e-40, 0)  # too small for a factor of its own
    out = matrix.multiply(x)
    np.testing.assert_array_equal(out[0], alone[0])
    assert (out[1] == 0).all()
    assert not np.isfinite(out[2:5]).any()
    assert (np.abs(out[5]) < 1e-35).all()


@pytest.mark.parametrize("kind", TYPES)
def test_a_packed_matrix_is_hardly_larger_than_the_file(kind: str) -> None:
    source = weights(kind, 64, 1536)
    for table in tables():
        assert Matrix(table, kind, source).packed_bytes <= 1.08 * source.nbytes
