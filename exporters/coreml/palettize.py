"""Palettes: groups of rows whose weights are indices into a table of a few values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 12  # of Lloyd's algorithm; the error has settled to about 1 % by then


@dataclass(frozen=True, eq=False)
class Palettized:
    """A weight matrix [rows, columns]; `group` neighbouring rows share a table."""

    indices: np.ndarray  # uint8 [rows, columns], below 2 ** bits
    tables: np.ndarray  # float16 [rows / group, 2 ** bits], ascending

    def dequantize(self) -> np.ndarray:
        """float32 [rows, columns]."""
        groups = len(self.tables)
        picked = np.take_along_axis(self.tables, self.indices.reshape(groups, -1), axis=1)
        return picked.astype(np.float32).reshape(self.indices.shape)


def palettize(weights: np.ndarray, bits: int, group: int) -> Palettized:
    """Tables near the best for each group in squared error: k-means in one dimension (Lloyd 1982),
    begun at the quantiles. `group` has to divide the rows."""
    flat = weights.reshape(-1, group * weights.shape[1])
    indices = np.empty(flat.shape, np.uint8)
    tables = np.empty((len(flat), 1 << bits), np.float16)
    for row, values in enumerate(flat):
        tables[row] = table = _cluster(values, 1 << bits).astype(np.float16)
        indices[row] = np.searchsorted(_borders(table), values)
    return Palettized(indices.reshape(weights.shape), tables)


def _cluster(values: np.ndarray, num_centres: int) -> np.ndarray:
    """Ascending centres, float64 [num_centres]."""
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = ordered[((np.arange(num_centres) + 0.5) / num_centres * len(ordered)).astype(int)]
    # Quantiles leave the tails, where large weights are, to few centres: half way to an even grid.
    centres = (centres + np.linspace(ordered[0], ordered[-1], num_centres)) / 2
    for _ in range(_ROUNDS):
        ends = np.concatenate(
            [[0], np.searchsorted(ordered, _borders(centres), side="right"), [len(ordered)]]
        )
        counts = np.diff(ends)
        centres = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), centres)
        centres.sort()
    return centres


def _borders(centres: np.ndarray) -> np.ndarray:
    """Half way between neighbours: values up to it belong to the lower one."""
    middle: np.ndarray = (centres[1:].astype(np.float32) + centres[:-1].astype(np.float32)) / 2
    return middle
