"""Rests between attempts, each twice as long as the previous one, until one succeeds."""

from __future__ import annotations


class SpacedRetries:
    """Counts a rest down in units chosen by its owner, such as rounds. Rests double from `first` up
    to `longest`; `reset` starts over."""

    def __init__(self, first: int, longest: int, resting: int = 0) -> None:
        """resting: units left of a rest that already began."""
        self.resting = resting  # units left of this rest
        self.length = first  # of the next rest
        self._first, self._longest = first, longest

    def count(self) -> None:
        """Count down one unit of a rest."""
        self.resting = max(0, self.resting - 1)

    def begin(self, at_least: int = 0) -> None:
        """Begin a rest of `length` units, or `at_least` if that is more."""
        self.resting = min(max(self.length, at_least), self._longest)

    def lengthen(self) -> None:
        """Double the next rest."""
        self.length = min(2 * self.length, self._longest)

    def reset(self) -> None:
        """Make the next rest the shortest, after a success."""
        self.length = self._first

    def rest(self, at_least: int = 0) -> None:
        """Begin a rest after a failure, and double the next one."""
        self.begin(at_least)
        self.lengthen()
