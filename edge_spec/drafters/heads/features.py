"""Keeps what trained heads read of a text: the target's features, and keys and values of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.errors import UnsupportedModelError

WINDOW = 2048  # entries that a row sees: heads are trained on texts of this length
_ROWS_AT_ONCE = 256
Step = TypeVar("Step")
Step_co = TypeVar("Step_co", covariant=True)
# Who reads what a session computes: the drafter that was attached last. One that takes its place is
# attached before it is closed.
readers: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


class LastState:
    """The target's state in which it chose the pending token: [hidden_size], after its final norm;
    not known before an answer's first round has ended."""

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
    """Keeps rows [size] float32 of positions without a gap, the last `capacity` of them at least. A
    write is the target's: what was kept from there on is obsolete."""

    def __init__(self, size: int, capacity: int) -> None:
        self._size, self._capacity = size, capacity
        self._rows: dict[int, np.ndarray] = {}  # by position, rising
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
        """[rows, size] from `start` to before `end`, which are there."""
        rows = [self._rows[position] for position in range(start, end)]
        return np.array(rows, np.float32).reshape(-1, self._size)

    def put(self, position: int, rows: np.ndarray) -> None:
        """rows: [tokens, size] of the tokens from `position` on."""
        self._written = position if self._written is None else min(self._written, position)
        if not self.first <= position <= self.end:  # nothing is known of those in between
            self._rows = {}
        elif position < self.end:
            self._keep(self.first, position)
        self._rows |= enumerate(np.array(rows, np.float32), position)
        if len(self._rows) > 2 * self._capacity:
            self._keep(self.end - self._capacity, self.end)

    def begin(self, agreed: int, length: int) -> None:
        """A text begins of which the target has read `length` tokens; its first `agreed` tokens are
        those of the text before. Forgets what was kept of other tokens: what a session was restored
        to, it has told nobody of."""
        written, self._written = self._written, None
        if written is None:
            self._keep(self.first, min(agreed, length))
        else:
            self._keep(written if written > agreed else self.first, length)

    def clear(self) -> None:
        self._rows, self._written = {}, None

    def _keep(self, first: int, end: int) -> None:
        """Forgets what is not from `first` to before `end`."""
        kept = range(max(first, self.first), min(end, self.end))
        self._rows = {position: self._rows[position] for position in kept}


class ReadsFeatures(Protocol[Step_co]):
    """The weights of a head that reads features."""

    config: ModelConfig  # of its layers
    feature_layers: Sequence[int]  # see `core.features`
    features_size: int  # of all features of a token beside each other

    def bound_to(self, cache: np.ndarray) -> Step_co:
        """Returns what makes entries in a cache, [layers, 2, kv_heads, slots, head_dim]."""


class TextEntries(Generic[Step]):
    """What a head has read of a text: the target's features, and of each an entry of keys and
    values, which `step` makes when it is needed. Slot 0 is the entry of feature `first`; there is
    room for more after those of the text. window: entries that a row sees. tokens_after: that an
    entry reads beside the features of the token before them.
    """

    def __init__(
        self,
        network: ReadsFeatures[Step],
        window: int = WINDOW,
        tokens_after: int = 0,
    ) -> None:
        self.window = window
        self.text: list[int] = []  # with the pending token, the last
        self.store = FeatureStore(network.features_size, window)
        self.first = self.end = 0  # features that there are entries of
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
        """Says whether the feature of the token before the pending one is known: not after a
        snapshot, until the target's next pass."""
        return self.store.has(len(self.text) - 2)

    def attach(self, session: Session, drafter: str) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
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
        agreed = 0  # leading tokens that are those of the text before
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
        """Forgets the entries from this one on."""
        self.end = max(min(self.end, end), self.first)
        if self.end == self.first:
            self.first = self.end = 0

    def missing(self, extra: int = 0) -> Iterator[tuple[int, int]]:
        """Yields which entries of the text to make, from and to before, as many as a pass takes, of
        those that a row sees. extra: slots that the last pass needs after them."""
        store, end = self.store, len(self.text) - 1
        if self.end < max(store.first, end - 2 * self.window):  # nobody knows what is between
            self.first = self.end = max(store.first, end - self.window)
        surplus = self.num_slots - self.window
        if surplus > self.window:  # a text of twice the window is cut to it
            self._use(self._cache[..., surplus:, :].copy())
            self.first += surplus
        self.make_room(end - self.end + extra)
        while end - self.end > _ROWS_AT_ONCE:
            yield self.end, self.end + _ROWS_AT_ONCE
            self.end += _ROWS_AT_ONCE
        yield self.end, end
        self.end = end

    def make_room(self, count: int) -> None:
        """Makes room for more entries."""
        missing = self.num_slots + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._use(np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)]))

    def _use(self, cache: np.ndarray) -> None:
        self._cache, self.step = cache, self._bind(cache)
