"""Palettes: groups of rows whose weights are indices into a table of a few values."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, log2

import numpy as np

MAX_TABLE_BITS = 0.25  # a weight
_ROUNDS = 20  # of Lloyd's algorithm; the error is within 1 % of where it settles by then
_BINS = 128


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


def palettize(weights: np.ndarray, bits: int) -> Palettized:
    """Tables near the best for each group in squared error: k-means in one dimension (Lloyd 1982).

    A group is as small as tables of 1/4 bit a weight allow, and divides the rows.
    """
    rows, columns = weights.shape
    group = gcd(_group_rows(columns, bits), rows)
    flat = weights.reshape(rows // group, -1)
    indices = np.empty(flat.shape, np.uint8)
    tables = np.empty((len(flat), 1 << bits), np.float16)
    for row, values in enumerate(flat):
        tables[row] = table = _cluster(values, 1 << bits).astype(np.float16)
        indices[row] = np.searchsorted(_borders(table), values)
    return Palettized(indices.reshape(weights.shape), tables)


def _group_rows(columns: int, bits: int) -> int:
    """The smallest power of two for which a float16 table costs no more than MAX_TABLE_BITS."""
    needed = (16 << bits) / (columns * MAX_TABLE_BITS)
    return 1 << max(ceil(log2(needed)), 0)


def _cluster(values: np.ndarray, num_centres: int) -> np.ndarray:
    """Ascending centres, float64 [num_centres]."""
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = _first_centres(ordered, num_centres)
    for _ in range(_ROUNDS):
        inner = np.searchsorted(ordered, _borders(centres), side="right")
        ends = np.concatenate([[0], inner, [len(ordered)]])
        counts = np.diff(ends)
        centres = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), centres)
        centres.sort()
    return centres


def _first_centres(ordered: np.ndarray, num_centres: int) -> np.ndarray:
    """As dense as the cube root of the density of the values, which is best for many centres
    (Panter and Dite 1951)."""
    counts, edges = np.histogram(ordered, _BINS)
    mass = np.concatenate([[0.0], np.cumsum(np.cbrt(counts))])
    wanted = (np.arange(num_centres) + 0.5) / num_centres * mass[-1]
    centres: np.ndarray = np.interp(wanted, mass, edges)
    return centres


def _borders(centres: np.ndarray) -> np.ndarray:
    """Half way between neighbours: values up to it belong to the lower one."""
    middle: np.ndarray = (centres[1:].astype(np.float32) + centres[:-1].astype(np.float32)) / 2
    return middle
