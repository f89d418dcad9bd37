"""Keeps where a session's tokens stand in the cache.

Position and slot are independent: an accepted path of a tree stays where it was scored, and the
slots of the rows that were dropped stay behind as holes that no mask shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASKED = -30000.0  # what a mask adds to scores that must not count: beyond any, within float16


class Slots:
    """Holds the slots of the committed tokens, in their order, which is also that of their
    slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._taken: list[int] = []
        # What a row that attends to all committed tokens adds to its scores.
        self._mask = np.full(num_slots, MASKED, np.float16)

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def end(self) -> int:
        """Returns the slot after the last taken one, where the next rows are written."""
        return self._taken[-1] + 1 if self._taken else 0

    @property
    def has_holes(self) -> bool:
        return self.end > len(self)

    def fits(self, rows: int) -> bool:
        """Returns whether a pass of `rows` rows, padding included, can be written after the end."""
        return self.end + rows <= self.num_slots

    def take(self, slots: Sequence[int]) -> None:
        """Takes slots for the next tokens; rising, and after the end."""
        self._taken += slots
        self._mask[list(slots)] = 0

    def forget(self, length: int) -> None:
        """All tokens from this one on."""
        self._mask[self._taken[length:]] = MASKED
        del self._taken[length:]

    def mask(self, sees: np.ndarray, rows: int) -> np.ndarray:
        """Returns the mask of a pass whose rows are written at the end, [1, 1, rows, num_slots]
        float16.

        sees: [n, n] bool, which of the n first rows each of them attends to, beside all committed
        tokens; the others are padding, which attends to itself.
        """
        count, start = len(sees), self.end
        mask = np.full((1, 1, rows, self.num_slots), MASKED, np.float16)
        mask[0, 0, :count] = self._mask
        mask[0, 0, :count, start : start + count][sees] = 0
        padding = np.arange(count, rows)
        mask[0, 0, padding, start + padding] = 0
        return mask

    def taken(self, state: np.ndarray, axis: int) -> np.ndarray:
        """A copy of the taken slots alone."""
        return np.take(state, self._taken, axis=axis)

    def compacted(self, state: np.ndarray, axis: int) -> np.ndarray:
        """A state whose taken slots stand side by side at its beginning."""
        moved = state.copy()
        front = (slice(None),) * axis
        moved[(*front, slice(0, len(self)))] = self.taken(state, axis)
        return moved

    def compact(self) -> None:
        """Closes the holes; call it once every state is `compacted`."""
        length = len(self)
        self.forget(0)
        self.take(range(length))
