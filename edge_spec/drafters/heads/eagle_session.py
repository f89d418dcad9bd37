"""A head as a model that drafts: its sessions read tokens, and take features from a store.

The entry of a token in the head's cache is made of the token and the feature of the one before it.
Where the target has not computed that feature, the head's own last state takes its place; as soon
as the target has, the entry is made again, in the pass that is asked for next (Li et al. 2024,
EAGLE, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import GivesFeatures
from edge_spec.core.heads import EntryRows
from edge_spec.core.model import Capabilities, Forward, Session, require_rollback, require_room
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.layers import EagleNetwork
from edge_spec.errors import UnsupportedModelError

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

    @property
    def none(self) -> np.ndarray:
        """[0, size] float32."""
        return self._rows[:0]

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


WINDOW = 2048  # entries that a row sees: heads are trained on texts of this length
_MAX_ROWS = 64
_PREFILL_ROWS = 256
_FIRST = np.zeros(1, np.int64)  # of one row


class _Entries(NamedTuple):
    """Entries that one pass makes, in the order of their slots."""

    slots: np.ndarray  # [rows] int
    positions: np.ndarray  # [rows] int
    before: np.ndarray  # [rows] slots whose features, or states, they go on from; -1: none
    sees: np.ndarray  # [rows, slots] bool, without themselves


class EagleModel:
    """Sessions of one head share its weights; each target session has a store of its own."""

    capabilities = Capabilities(max_rows=_MAX_ROWS, trees=True, rollback=True, hidden_states=False)

    def __init__(self, network: EagleNetwork, features: FeatureStore) -> None:
        self.config: ModelConfig = network.config
        self._network = network
        self._features = features

    def open_session(self) -> EagleSession:
        return EagleSession(self._network, self._features)

    def close(self) -> None:
        """Has nothing open."""


class EagleSession:
    """Slot s of the arrays holds position s + `_base` of the text, then the rows of a tree."""

    def __init__(self, network: EagleNetwork, features: FeatureStore) -> None:
        config = network.config
        self.length = 0
        self._network = network
        self._features = features
        self._window = min(WINDOW, network.window or WINDOW)
        self._base = 0
        self._tokens = np.empty(0, np.int32)
        self._cache = np.empty(
            (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim), np.float32
        )
        self._step = network.bound_to(self._cache)
        self._states = np.empty((0, config.hidden_size), np.float32)  # what each goes on from
        self._is_known = np.empty(0, bool)  # entries made of some feature,
        self._is_final = np.empty(0, bool)  # entries made of the target's

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._network.config.context_length)
        for start in range(0, len(tokens), _PREFILL_ROWS):
            chunk = np.asarray(tokens[start : start + _PREFILL_ROWS], np.int32)
            first = self._reserve(len(chunk))
            self._tokens[first : first + len(chunk)] = chunk
            self.length += len(chunk)
            self._refresh()

    def forward(self, tree: TokenTree) -> Forward:
        """Its logits are of the tokens that the head scores, [rows, num_scored]."""
        rows = len(tree)
        require_room(self.length, rows, self._network.config.context_length)
        first = self._reserve(rows)
        self._tokens[first : first + rows] = tree.tokens
        if rows == 1 and self._goes_on(first):
            return Forward(self._make_next(first))
        scores = np.empty((rows, self._network.num_scored), np.float32)
        for at in self._levels(tree):
            stale = self._stale() if at[0] == 0 else np.empty(0, np.int64)
            slots = np.concatenate([stale, first + at])
            sees = self._text_seen(slots, stale, first + rows)
            sees[len(stale) :, first:] = tree.ancestors[at]
            positions = np.concatenate([stale + self._base, self.length + tree.depths[at]])
            before = np.concatenate([stale - 1, first + tree.parents[at]])
            entries = _Entries(slots, positions, before, sees)
            scores[at] = self._make(entries, np.arange(len(stale), len(slots)))
        return Forward(scores)

    def commit(self, rows: Sequence[int]) -> None:
        count, first = len(rows), self.length - self._base
        if list(rows) != list(range(count)):  # they are not where they belong
            taken, kept = first + np.asarray(rows), slice(first, first + count)
            self._cache[..., kept, :] = self._cache[..., taken, :]
            for array in (self._tokens, self._states, self._is_known, self._is_final):
                array[kept] = array[taken]
        self.length += count

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length
        if length < self._base:  # what was before is forgotten
            self._base = length

    def close(self) -> None:
        self._cache = self._cache[..., :0, :].copy()
        self._step = self._network.bound_to(self._cache)

    def _goes_on(self, slot: int) -> bool:
        """Says whether an entry comes of the head's own state before it, as that of each draft
        token of a chain does after the first, and nothing else is to be made."""
        has_state = 0 < slot < self._window and bool(self._is_known[slot - 1])
        return has_state and self._features.end < self.length and not len(self._stale())

    def _make_next(self, slot: int) -> np.ndarray:
        """`_make` of one such entry, in a third of its time."""
        one = slice(slot, slot + 1)
        seen = self._is_known[: slot + 1].copy()
        seen[slot] = True
        rows = EntryRows(
            self._network.embed(self._tokens[one]),
            self._features.none,
            self._states[slot - 1 : slot],
            _FIRST,
            np.array([slot + self._base]),
            slot,
            None if seen.all() else seen[None],
            _FIRST,
        )
        self._states[one], logits = self._step(rows)
        self._is_known[one], self._is_final[one] = True, False
        return logits

    def _levels(self, tree: TokenTree) -> Iterator[np.ndarray]:
        """Rows that a pass can take at once: those after tokens that the target has read, then one
        level after the other."""
        read = max(self._features.end - self.length, 0)
        yield np.flatnonzero(tree.depths <= read)
        for depth in range(read + 1, int(tree.depths.max()) + 1):
            yield np.flatnonzero(tree.depths == depth)

    def _refresh(self) -> None:
        """Makes the entries of the text that lack the target's features, as far as it has them."""
        stale = self._stale()
        if len(stale):
            sees = self._text_seen(stale, stale, self.length - self._base)
            entries = _Entries(stale, stale + self._base, stale - 1, sees)
            self._make(entries, np.array([len(stale) - 1]))  # a step scores something

    def _stale(self) -> np.ndarray:
        """[rows] slots of the text whose entries can be made of the target's features now."""
        open_slots = np.flatnonzero(~self._is_final[: self.length - self._base])
        found: np.ndarray = open_slots[self._features.available(open_slots + self._base - 1)]
        return found

    def _text_seen(self, slots: np.ndarray, stale: np.ndarray, width: int) -> np.ndarray:
        """[rows, width] bool: what rows see of the text, whose stale entries are made with them."""
        made = np.zeros(width, bool)
        end = self.length - self._base
        made[:end] = self._is_known[:end]
        made[stale] = True
        found: np.ndarray = made & (np.arange(width) <= slots[:, None])
        return found

    def _make(self, entries: _Entries, scored: np.ndarray) -> np.ndarray:
        """Makes entries, and returns the logits of the scored ones, [scored, num_scored]."""
        slots, positions, before, sees = entries
        count, width = len(slots), sees.shape[1]
        seen = self._reached(sees, slots, positions)
        is_final = self._features.available(positions - 1)
        start = int(slots[0])
        in_place = slots[-1] - start == count - 1  # each after the one before it
        if in_place:
            seen = None if seen is None else seen[:, : start + count]
        else:  # they are made after all others, where they see themselves
            own = sees[:, slots]
            ahead = sees.copy() if seen is None else seen.copy()
            ahead[:, slots] = False
            start, seen = width, np.concatenate([ahead, own], axis=1)
            self._make_room(width + count)
        rows = EntryRows(
            self._network.embed(self._tokens[slots]),
            self._features.get(positions[is_final] - 1),
            self._replacing(before[~is_final]),
            np.argsort(np.argsort(~is_final, kind="stable")),
            positions,
            start,
            seen,
            scored,
        )
        states, logits = self._step(rows)
        if not in_place:
            self._cache[..., slots, :] = self._cache[..., start : start + count, :]
        self._states[slots] = states
        self._is_final[slots] = is_final
        self._is_known[slots] = is_final | ((before >= 0) & self._is_known[before])
        return logits

    def _reached(
        self, sees: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> np.ndarray | None:
        """Returns what rows see, with themselves, within the window; None where that is all there
        is."""
        text, width = self.length - self._base, sees.shape[1]
        sees[np.arange(len(slots)), slots] = True
        if width > self._window:
            reach = np.full(width, self.length)  # rows of a tree are near enough
            reach[:text] = np.arange(self._base, self.length)
            near = reach > positions[:, None] - self._window
            sees = sees & (near | (np.arange(width) == slots[:, None]))
        return None if sees.all() else sees

    def _replacing(self, before: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]: what takes the place of features that the target has not computed,
        or nothing where nothing does."""
        states: np.ndarray = self._states[before]
        states[(before < 0) | ~self._is_known[before]] = 0
        return states

    def _reserve(self, rows: int) -> int:
        """Makes room for rows after the text, and returns the slot of the first. A text of twice
        the window is cut to it."""
        surplus = self.length - self._base - WINDOW
        if surplus > WINDOW:
            self._base += surplus
            self._cache = self._cache[..., surplus:, :].copy()
            self._step = self._network.bound_to(self._cache)
            self._tokens, self._states = self._tokens[surplus:], self._states[surplus:]
            self._is_known, self._is_final = self._is_known[surplus:], self._is_final[surplus:]
        first = self.length - self._base
        self._make_room(first + rows)
        self._is_known[first:] = self._is_final[first:] = False
        return first

    def _make_room(self, slots: int) -> None:
        missing = slots - len(self._tokens)
        if missing > 0:
            grown = max(missing, _PREFILL_ROWS)
            self._cache = np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)])
            self._states = np.pad(self._states, [(0, grown), (0, 0)])
            self._tokens = np.pad(self._tokens, (0, grown))
            self._is_known = np.pad(self._is_known, (0, grown))
            self._is_final = np.pad(self._is_final, (0, grown))
            self._step = self._network.bound_to(self._cache)
