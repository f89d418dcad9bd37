"""Rests between attempts, doubled until one succeeds."""

from __future__ import annotations


class SpacedRetries:
    """Counts rests in its owner's units, such as rounds. Rests double from `first` to `longest`;
    `reset` starts over."""

    def __init__(self, first: int, longest: int, resting: int = 0) -> None:
        """resting: units left of a rest that began before."""
        self.resting = resting  # units left
        self.length = first  # of the next rest
        self._first, self._longest = first, longest

    def count(self) -> None:
        self.resting = max(0, self.resting - 1)

    def begin(self, at_least: int = 0) -> None:
        """Begin a rest of `length` units, at least `at_least`."""
        self.resting = min(max(self.length, at_least), self._longest)

    def lengthen(self) -> None:
        self.length = min(2 * self.length, self._longest)

    def reset(self) -> None:
        self.length = self._first

    def rest(self, at_least: int = 0) -> None:
        """Begin a rest after a failure, and double the next."""
        self.begin(at_least)
        self.lengthen()
