"""Keeps the target's features of the text that trained heads draft from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.errors import UnsupportedModelError

WINDOW = 2048  # entries that a row sees: heads are trained on texts of this length
_GROWTH = 256  # rows that are made room for at once
# Who reads a session's features: the drafter that was attached last. One that takes its place is
# attached before it is closed.
_readers: WeakKeyDictionary[Any, TargetFeatures] = WeakKeyDictionary()


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

    def get(self, start: int, end: int) -> np.ndarray:
        """[rows, size] from `start` to before `end`, which are there."""
        return self._rows[start - self._first : end - self._first]

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


class TargetFeatures:
    """Keeps a store in step with the text. layers: whose features are read."""

    def __init__(self, layers: Sequence[int], size: int, window: int) -> None:
        self.store = FeatureStore(size, window)
        self.text: list[int] = []  # with the pending token, the last
        self._layers = layers
        self._collecting: GivesFeatures | None = None

    @property
    def is_ready(self) -> bool:
        """Says whether the feature of the token before the pending one is known; it is not after a
        snapshot, until the target's next pass."""
        return self.store.has(len(self.text) - 2)

    def attach(self, session: Session, name: str) -> None:
        """name: of the drafter. Raises UnsupportedModelError where the runtime does not give
        features."""
        if not isinstance(session, GivesFeatures):
            raise UnsupportedModelError(
                f"the drafter {name} needs what the target's layers compute, which this "
                "runtime does not give",
                remedy="Use another --runtime, or another drafter.",
            )
        session.collect_features(self._layers, self._take)
        self._collecting, _readers[session] = session, self
        self.store.clear()

    def begin(self, prompt: Sequence[int]) -> int:
        """Returns how many of its first tokens are those of the text before."""
        agreed = 0
        for old, new in zip(self.text, prompt, strict=False):
            if old != new:
                break
            agreed += 1
        self.store.begin(agreed, len(prompt) - 1)
        self.text = list(prompt)
        return agreed

    def observe(self, out: Forward, verdict: Verdict) -> None:
        if out.features is not None and verdict.tokens:
            self._take(len(self.text) - 1, out.features[np.asarray(verdict.kept)])
        self.text += verdict.tokens

    def forget(self) -> None:
        self.store.clear()
        self.text = []

    def close(self) -> None:
        session, self._collecting = self._collecting, None
        if session is not None and _readers.get(session) is self:
            session.collect_features((), _ignore)

    def _take(self, position: int, found: np.ndarray) -> None:
        self.store.put(position, found.reshape(len(found), -1))


def _ignore(position: int, found: np.ndarray) -> None:
    """Takes nothing."""
