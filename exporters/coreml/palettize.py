"""Palettes: groups of rows whose weights are indices into a table of a few values."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, log2

import numpy as np

MAX_TABLE_BITS = 0.25  # a weight
_ROUNDS = 15  # of Lloyd's algorithm


@dataclass(frozen=True, eq=False)
class Palettized:
    """A weight matrix [rows, columns]; as many neighbouring rows share each table."""

    indices: np.ndarray  # uint8 [rows, columns], below 2 ** bits
    tables: np.ndarray  # float16 [groups, 2 ** bits], ascending

    def dequantize(self) -> np.ndarray:
        """float32 [rows, columns]."""
        groups = len(self.tables)
        picked = np.take_along_axis(self.tables, self.indices.reshape(groups, -1), axis=1)
        return picked.astype(np.float32).reshape(self.indices.shape)


def palettize(weights: np.ndarray, bits: int, importance: np.ndarray | None = None) -> Palettized:
    """Tables near the best for each group: weighted k-means in one dimension (Lloyd 1982; weights
    by sensitivity: Kim et al. 2024, SqueezeLLM).

    importance: [columns], how much an error there counts, such as the mean square of the input
    that it is multiplied with. A group is as small as tables of 1/4 bit a weight allow, and
    divides the rows.
    """
    rows, columns = weights.shape
    group = gcd(_group_rows(columns, bits), rows)
    flat = weights.reshape(rows // group, -1)
    counts = np.ones(columns) if importance is None else importance / importance.mean()
    counts = np.tile(counts, group)
    indices = np.empty(flat.shape, np.uint8)
    tables = np.empty((len(flat), 1 << bits), np.float16)
    for row, values in enumerate(flat):
        tables[row] = table = _cluster(values, counts, 1 << bits).astype(np.float16)
        indices[row] = np.searchsorted(_borders(table), values)
    return Palettized(indices.reshape(weights.shape), tables)


def _group_rows(columns: int, bits: int) -> int:
    """The smallest power of two for which a float16 table costs no more than MAX_TABLE_BITS."""
    needed = (16 << bits) / (columns * MAX_TABLE_BITS)
    return 1 << max(ceil(log2(needed)), 0)


def _cluster(values: np.ndarray, counts: np.ndarray, num_centres: int) -> np.ndarray:
    """Ascending centres, float64 [num_centres]; each value counts as often as `counts` says."""
    order = np.argsort(values)
    ordered, counts = values[order].astype(np.float64), counts[order]
    mass = np.concatenate([[0.0], np.cumsum(counts)])
    sums = np.concatenate([[0.0], np.cumsum(counts * ordered)])
    # Quantiles leave the tails, where large weights are, to few centres: half way to an even grid.
    wanted = (np.arange(num_centres) + 0.5) / num_centres * mass[-1]
    centres: np.ndarray = np.interp(wanted, mass[1:], ordered)
    centres = (centres + np.linspace(ordered[0], ordered[-1], num_centres)) / 2
    for _ in range(_ROUNDS):
        inner = np.searchsorted(ordered, _borders(centres), side="right")
        ends = np.concatenate([[0], inner, [len(ordered)]])
        within = np.diff(mass[ends])
        centres = np.where(within > 0, np.diff(sums[ends]) / np.maximum(within, 1e-30), centres)
        centres.sort()
    return centres


def _borders(centres: np.ndarray) -> np.ndarray:
    """Half way between neighbours: values up to it belong to the lower one."""
    middle: np.ndarray = (centres[1:].astype(np.float32) + centres[:-1].astype(np.float32)) / 2
    return middle
