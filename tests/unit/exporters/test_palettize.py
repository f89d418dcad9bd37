"""Tables of weights: exact where they can be, near the best where they cannot."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("coremltools")  # which the package of this module needs

from edge_spec.exporters.coreml.weights import MAX_TABLE_BITS, Palettized, palettize


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal((rows, columns)).astype(np.float32)


def dequantized(found: Palettized) -> np.ndarray:
    groups = found.indices.reshape(len(found.tables), -1)
    picked = np.take_along_axis(found.tables, groups, axis=1)
    return picked.astype(np.float32).reshape(found.indices.shape)


def test_as_many_values_as_entries_are_kept_exactly() -> None:
    values = np.linspace(-1, 1, 16).astype(np.float16).astype(np.float32)
    weights = np.random.RandomState(0).choice(values, (8, 4096))
    assert np.array_equal(dequantized(palettize(weights, 4)), weights)


def test_columns_that_count_more_are_nearer() -> None:
    weights = normal(4, 512)
    importance = np.where(np.arange(512) % 2, 100.0, 1.0)
    plain, weighted = palettize(weights, 4), palettize(weights, 4, importance)

    def error(found: Palettized) -> float:
        return float(np.mean((dequantized(found) - weights) ** 2 * importance))

    assert error(weighted) < 0.95 * error(plain)


def test_the_error_is_that_of_the_best_table_for_normal_weights() -> None:
    """Max 1960, table I: 16 levels leave 0.009497 of the variance of a normal distribution."""
    weights = normal(8, 4096)
    error = np.mean((dequantized(palettize(weights, 4)) - weights) ** 2) / weights.var()
    assert error < 0.0105  # of a finite sample, in float16


@pytest.mark.parametrize(
    ("columns", "bits", "groups"), [(4096, 4, 16), (576, 4, 8), (576, 6, 2), (64, 4, 1)]
)
def test_tables_cost_at_most_a_quarter_bit_a_weight(columns: int, bits: int, groups: int) -> None:
    found = palettize(normal(16, columns), bits)
    assert found.tables.shape == (groups, 1 << bits)
    if groups > 1:
        assert 16 * found.tables.size / found.indices.size <= MAX_TABLE_BITS
