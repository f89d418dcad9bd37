"""Drafts of heads that read a text's features once, keep keys and values of it, and score several
rows after the text in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import HeadScores
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.eagle_session import WINDOW
from edge_spec.drafters.heads.feature_store import TargetFeatures
from edge_spec.drafters.heads.independent import IndependentDrafter, IndependentHeads
from edge_spec.drafters.protocol import Budget

_ROWS_AT_ONCE = 256


class ReadsFeatures(Protocol):
    """A head that reads its target's features."""

    @property
    def config(self) -> ModelConfig:
        """Returns the config of its layers."""

    @property
    def feature_layers(self) -> Sequence[int]:
        """See `core.features`."""

    @property
    def features_size(self) -> int:
        """Counts the numbers of all features of a token beside each other."""


class BlockDrafter(IndependentDrafter):
    """head: drafters of several conversations share it. window: entries that a row sees."""

    _tokens_after = 0  # that an entry reads beside the features of the token before them

    def __init__(
        self, head: ReadsFeatures, heads: IndependentHeads, name: str, window: int = WINDOW
    ) -> None:
        super().__init__(heads, name)
        self._window = window
        self._target = TargetFeatures(head.feature_layers, head.features_size, window)
        config, self._pending = head.config, 0
        shape = (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim)
        self._cache = np.zeros(shape, np.float32)
        self._bind(self._cache)
        self._first = self._end = 0  # features that the cache has entries of, from slot 0 on

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)
        self._forget(0)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._forget(self._target.begin(prompt) - self._tokens_after)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._pending = pending
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._target.forget()
        self._forget(0)

    def close(self) -> None:
        self._target.close()
        super().close()

    @property
    def _is_ready(self) -> bool:
        return self._target.is_ready

    def _bind(self, cache: np.ndarray) -> None:
        """Computes with this cache from now on."""
        raise NotImplementedError

    def _read(self, start: int, end: int, num_asked: int) -> HeadScores:
        """Makes the entries of features from `start` to before `end`, and scores as many draft
        tokens after them, if any."""
        raise NotImplementedError

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Reads what is missing of the text, too, at most its last ones, as many as a row sees."""
        store, end = self._target.store, len(self._target.text) - 1
        if self._end < max(store.first, end - 2 * self._window):  # nobody knows what is between
            self._first = self._end = max(store.first, end - self._window)
        while end - self._end > _ROWS_AT_ONCE:
            self._read_to(self._end + _ROWS_AT_ONCE, 0)
        return self._read_to(end, len(heads))

    def _read_to(self, end: int, num_asked: int) -> HeadScores:
        self._make_room(end - self._end + self._extra_rows(num_asked))
        found = self._read(self._end, end, num_asked)
        self._end = end
        return found

    def _extra_rows(self, num_asked: int) -> int:
        """Counts entries beyond the text's that a pass makes in the cache."""
        return 0

    def _make_room(self, count: int) -> None:
        """Makes room for more entries. A text of twice the window is cut to it."""
        surplus = self._end - self._first - self._window
        if surplus > self._window:
            self._cache = self._cache[..., surplus:, :].copy()
            self._first += surplus
        missing = self._end - self._first + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._cache = np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)])
        if surplus > self._window or missing > 0:
            self._bind(self._cache)

    def _forget(self, end: int) -> None:
        """Forgets the entries from this position on."""
        self._end = max(min(self._end, end), self._first)
        if self._end == self._first:
            self._first = self._end = 0
