"""Keeps what a head knows of its target: one row of features for each token of the text."""

from __future__ import annotations

import numpy as np

_GROWTH = 256  # rows that are made room for at once


class FeatureStore:
    """Keeps rows [size] float32 of positions without a gap, the last `capacity` of them at least.

    A write at a position is the target's: it makes all that was kept from there on obsolete.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self._capacity = capacity
        self._first = self._count = 0
        self._rows = np.empty((0, size), np.float32)  # of which the first `_count` are kept
        self._written: int | None = None  # the lowest position since the last `begin`

    @property
    def first(self) -> int:
        return self._first

    @property
    def end(self) -> int:
        return self._first + self._count

    def has(self, position: int) -> bool:
        return self._first <= position < self.end

    def available(self, positions: np.ndarray) -> np.ndarray:
        """positions: [rows] int -> [rows] bool."""
        found: np.ndarray = (positions >= self._first) & (positions < self.end)
        return found

    def get(self, positions: np.ndarray) -> np.ndarray:
        """[rows, size] of positions that are available."""
        rows: np.ndarray = self._rows[positions - self._first]
        return rows

    def put(self, position: int, rows: np.ndarray) -> None:
        """rows: [tokens, size] of the tokens from `position` on."""
        self._written = position if self._written is None else min(self._written, position)
        if not self._first <= position <= self.end:  # nothing is known of those in between
            self._first, self._count = position, 0
        start = position - self._first
        end = start + len(rows)
        if end > len(self._rows):
            self._rows = np.pad(self._rows[:start], [(0, len(rows) + _GROWTH), (0, 0)])
        self._rows[start:end] = rows
        self._count = end
        if end > 2 * self._capacity:
            self._keep(self.end - self._capacity, self.end)

    def begin(self, agreed: int, length: int) -> None:
        """A text begins of which the target has read `length` tokens; its first `agreed` tokens are
        those of the text before. Forgets what was kept of other tokens: what a session was restored
        to, it has told nobody of."""
        written, self._written = self._written, None
        if written is None:
            self._keep(self._first, agreed)
        elif written > agreed:
            self._keep(written, self.end)
        self._keep(self._first, length)

    def clear(self) -> None:
        self._first = self._count = 0
        self._written = None

    def _keep(self, first: int, end: int) -> None:
        """Forgets what is not from `first` to before `end`."""
        end = min(max(end, self._first), self.end)
        first = min(max(first, self._first), end)
        if first > self._first:
            self._rows = self._rows[first - self._first : end - self._first].copy()
        self._first, self._count = first, end - first
