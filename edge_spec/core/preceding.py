"""Finds which rows stand before the rows of a pass in their paths: what a short convolution
takes in.

Rows of a tree stand side by side in the cache, so that the one before a row in its path is not the
one before it in the cache.
"""

from __future__ import annotations

import numpy as np

NOTHING = -1  # stands before the text


def preceding(parents: np.ndarray, start: int, count: int) -> np.ndarray:
    """Returns [count, rows] int64: where the row before each row of a pass is cached, the one
    before that, and so on; NOTHING where the text has begun later.

    parents: [rows] int, of the pass, -1 where it is the last cached token. start: how many tokens
    are cached; the rows of the pass follow them.
    """
    found = np.empty((count, len(parents)), np.int64)
    row = np.asarray(parents, np.int64)
    for distance in range(count):
        found[distance] = row
        row = np.where(row >= 0, parents[np.maximum(row, 0)], row - 1)
    return np.maximum(found + start, NOTHING)


def chain_parents(rows: int) -> np.ndarray:
    """Returns [rows] int64: of rows that follow each other."""
    return np.arange(-1, rows - 1)


def parents_seen(sees: np.ndarray) -> np.ndarray:
    """Returns [rows] int64: of rows whose paths are `sees` [rows, rows] bool, themselves included;
    each row's parent is the last row before it that it sees."""
    before = np.tril(sees, -1)
    last = len(sees) - 1 - np.argmax(before[:, ::-1], axis=1)
    return np.where(before.any(axis=1), last, -1)
