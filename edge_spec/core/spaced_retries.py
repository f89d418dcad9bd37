"""Rests between attempts, each twice as long as the one before, until an attempt succeeds."""

from __future__ import annotations


class SpacedRetries:
    """Counts a rest down, in units of its owner, such as rounds. The first has `first` units and
    each further one twice as many, up to `longest`; after `reset` the next is the first again."""

    def __init__(self, first: int, longest: int, resting: int = 0) -> None:
        """resting: units of a rest that has begun already."""
        self.resting = resting  # units left of this rest
        self.length = first  # of the next rest
        self._first, self._longest = first, longest

    def count(self) -> None:
        """Counts one unit of the rest, if there is one."""
        self.resting = max(0, self.resting - 1)

    def begin(self, at_least: int = 0) -> None:
        """Begins a rest of `length` units, or of `at_least` where that is more."""
        self.resting = min(max(self.length, at_least), self._longest)

    def lengthen(self) -> None:
        """Makes the next rest twice as long."""
        self.length = min(2 * self.length, self._longest)

    def reset(self) -> None:
        """Makes the next rest the first again: an attempt has succeeded."""
        self.length = self._first

    def rest(self, at_least: int = 0) -> None:
        """Begins a rest after an attempt that failed; the next one is twice as long."""
        self.begin(at_least)
        self.lengthen()
