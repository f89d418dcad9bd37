"""What trained heads read of a text: the target's features, and keys and values made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.errors import UnsupportedModelError

WINDOW = 2048  # entries that a row sees, as long as training texts
_ROWS_AT_ONCE = 256
# The drafter last attached to a session reads what it computes. Its successor is attached before it
# is closed.
readers: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


class LastState:
    """The target's state that chose the pending token; unknown until an answer's first round ends.
    [hidden_size], after the final norm."""

    state: np.ndarray | None = None

    @property
    def is_ready(self) -> bool:
        return self.state is not None

    def attach(self, session: Session, drafter: str) -> None:
        self.clear()

    def begin(self, prompt: Sequence[int]) -> None:
        self.clear()

    def observe(self, out: Forward, verdict: Verdict) -> None:
        self.state = None
        if out.hidden is not None and verdict.tokens:
            self.state = out.hidden[verdict.kept[-1]].copy()

    def clear(self) -> None:
        self.state = None

    def close(self) -> None: ...


class FeatureStore:
    """Keeps at least the last `capacity` rows [size] float32, at positions without gaps. A write
    comes from the target and invalidates later rows."""

    def __init__(self, size: int, capacity: int) -> None:
        self._size, self._capacity = size, capacity
        self._rows: dict[int, np.ndarray] = {}  # by position, ascending
        self._written: int | None = None  # the lowest position since the last `begin`

    @property
    def first(self) -> int:
        return next(iter(self._rows), 0)

    @property
    def end(self) -> int:
        return self.first + len(self._rows)

    def has(self, position: int) -> bool:
        return position in self._rows

    def get(self, start: int, end: int) -> np.ndarray:
        """Return [rows, size] from `start` to before `end`, which must be present."""
        rows = [self._rows[position] for position in range(start, end)]
        return np.array(rows, np.float32).reshape(-1, self._size)

    def put(self, position: int, rows: np.ndarray) -> None:
        """Store [tokens, size] of the tokens from `position` on."""
        self._written = position if self._written is None else min(self._written, position)
        if not self.first <= position <= self.end:  # rows in between are unknown
            self._rows = {}
        elif position < self.end:
            self._keep(self.first, position)
        self._rows |= enumerate(np.array(rows, np.float32), position)
        if len(self._rows) > 2 * self._capacity:
            self._keep(self.end - self._capacity, self.end)

    def begin(self, agreed: int, length: int) -> None:
        """Begin a text that shares `agreed` tokens with the last one, with `length` tokens read.
        Drops rows of other tokens: a restored session reports no features."""
        written, self._written = self._written, None
        if written is None:
            self._keep(self.first, min(agreed, length))
        else:
            self._keep(written if written > agreed else self.first, length)

    def clear(self) -> None:
        self._rows, self._written = {}, None

    def _keep(self, first: int, end: int) -> None:
        kept = range(max(first, self.first), min(end, self.end))
        self._rows = {position: self._rows[position] for position in kept}


class TextEntries:
    """What a head has read of a text: features, and an entry of keys and values for each.

    `step` makes entries when needed. Slot 0 is the entry of feature `first`; slots after the text's
    are for draft tokens. window: entries that a row sees. tokens_after: tokens that an entry also
    reads.
    """

    def __init__(self, network: LayersNetwork, window: int = WINDOW, tokens_after: int = 0) -> None:
        self.window = window
        self.text: list[int] = []  # ends with the pending token
        self.store = FeatureStore(network.features_size, window)
        self.first = self.end = 0  # range of features with entries
        self._layers = network.feature_layers
        self._collecting: GivesFeatures | None = None
        config = network.config
        shape = (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim)
        self._bind = network.bound_to
        self._use(np.zeros(shape, np.float32))
        self._tokens_after = tokens_after

    @property
    def num_slots(self) -> int:
        return self.end - self.first

    @property
    def is_ready(self) -> bool:
        """Return True if the last feature is known; after a snapshot, only once the target made a
        pass."""
        return self.store.has(len(self.text) - 2)

    def attach(self, session: Session, drafter: str) -> None:
        """Raise UnsupportedModelError if the runtime does not give features."""
        if not isinstance(session, GivesFeatures):
            raise UnsupportedModelError(
                f"the drafter {drafter} needs what the target's layers compute, which this "
                "runtime does not give",
                remedy="Use another --runtime, or another drafter.",
            )
        session.collect_features(self._layers, self._take)
        self._collecting, readers[session] = session, self
        self.clear()

    def begin(self, prompt: Sequence[int]) -> None:
        agreed = 0  # leading tokens shared with the last text
        for old, new in zip(self.text, prompt, strict=False):
            if old != new:
                break
            agreed += 1
        self.store.begin(agreed, len(prompt) - 1)
        self.text = list(prompt)
        self.forget(agreed - self._tokens_after)

    def observe(self, out: Forward, verdict: Verdict) -> None:
        if out.features is not None and verdict.tokens:
            self._take(len(self.text) - 1, out.features[np.asarray(verdict.kept)])
        self.text += verdict.tokens

    def clear(self) -> None:
        self.store.clear()
        self.text = []
        self.forget(0)

    def close(self) -> None:
        session, self._collecting = self._collecting, None
        if session is not None and readers.get(session) is self:
            session.collect_features((), lambda position, found: None)

    def _take(self, position: int, found: np.ndarray) -> None:
        self.store.put(position, found.reshape(len(found), -1))

    def forget(self, end: int) -> None:
        """Drop the entries from `end` on."""
        self.end = max(min(self.end, end), self.first)
        if self.end == self.first:
            self.first = self.end = 0

    def missing(self, extra: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of entries that a row sees and that are missing, one pass at a time.
        extra: slots that the last pass needs after them."""
        store, end = self.store, len(self.text) - 1
        if self.end < max(store.first, end - 2 * self.window):  # the gap is unknown
            self.first = self.end = max(store.first, end - self.window)
        surplus = self.num_slots - self.window
        if surplus > self.window:  # cut to one window once it reaches two
            self._use(self._cache[..., surplus:, :].copy())
            self.first += surplus
        self.make_room(end - self.end + extra)
        while end - self.end > _ROWS_AT_ONCE:
            yield self.end, self.end + _ROWS_AT_ONCE
            self.end += _ROWS_AT_ONCE
        yield self.end, end
        self.end = end

    def make_room(self, count: int) -> None:
        missing = self.num_slots + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._use(np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)]))

    def _use(self, cache: np.ndarray) -> None:
        self._cache, self.step = cache, self._bind(cache)
