"""States of recurrent layers after some of a text's tokens: from these places a text goes on
otherwise without being read again from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAX_PLACES, MAX_BYTES = 16, 400_000_000  # of a session
_NEAR = 64  # tokens at the end of a text, which are read again in no time


@dataclass(eq=False)
class Place:
    """state: [bytes] uint8, of the recurrent layers alone, in the library's own form. was_used:
    whether the text has gone on from here before."""

    length: int
    state: np.ndarray
    was_used: bool = False


class Places:
    """The places of one text, within a bound of memory.

    Those that go first are dense for what is read again anyway where the text parts there: the
    nearer to its end, the closer they stand.
    """

    def __init__(self) -> None:
        self._places: list[Place] = []  # by length

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def add(self, place: Place) -> None:
        self.cut(place.length - 1)
        self._places.append(place)
        while self._is_over():
            self._places.remove(self._least_missed())

    def before(self, length: int) -> Place | None:
        """Returns the last one that is not beyond `length`."""
        return next((each for each in reversed(self._places) if each.length <= length), None)

    def cut(self, length: int) -> None:
        """Forgets those beyond."""
        while self._places and self._places[-1].length > length:
            self._places.pop()

    def clear(self) -> None:
        self._places.clear()

    def _is_over(self) -> bool:
        num_bytes = sum(each.state.nbytes for each in self._places)
        return len(self._places) > MAX_PLACES or (len(self._places) > 1 and num_bytes > MAX_BYTES)

    def _least_missed(self) -> Place:
        """Returns the one without which least is read again, beside what is read anyway; not the
        last one, nor one that was used while there are others."""
        places, end = self._places, self._places[-1].length
        costs = []
        for index, place in enumerate(places[:-1]):
            before = places[index - 1].length if index else 0
            anyway = end - places[index + 1].length + _NEAR
            costs.append((place.was_used, (place.length - before) / anyway, index))
        return places[min(costs)[2]]
