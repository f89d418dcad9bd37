"""Drafts with a DFlash head (z-lab): all tokens of a block in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.heads import BlockRows, HeadScores
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.dflash_network import DFlashNetwork
from edge_spec.drafters.heads.eagle_session import WINDOW
from edge_spec.drafters.heads.independent import IndependentDrafter
from edge_spec.drafters.heads.target_features import TargetFeatures
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits

_ROWS_AT_ONCE = 256


class DFlashDrafter(IndependentDrafter):
    """network: of the head; drafters of several conversations share it."""

    traits = DrafterTraits(cost=Cost.PASS, target_session=True, head="dflash")

    def __init__(self, network: DFlashNetwork, name: str = "dflash") -> None:
        super().__init__(network, name)
        self._network = network
        self._target = TargetFeatures(network.feature_layers, network.features_size, WINDOW)
        config, self._pending = network.config, 0
        heads, size = config.num_kv_heads, config.head_dim
        self._cache = np.zeros((config.num_layers, 2, heads, 0, size), np.float32)
        self._step = network.bound_to(self._cache)
        self._first = self._end = 0  # positions that the cache has entries of, from slot 0 on

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)
        self._forget(0)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._forget(self._target.begin(prompt))

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

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Reads what is missing of the text, too, at most its last WINDOW tokens."""
        store, end = self._target.store, len(self._target.text) - 1
        if self._end < max(store.first, end - 2 * WINDOW):  # nobody knows what is between
            self._first = self._end = max(store.first, end - WINDOW)
        block = self._network.embedded(self._pending)
        while end - self._end > _ROWS_AT_ONCE:
            self._read(block[:1], self._end + _ROWS_AT_ONCE, 0)
        return self._read(block, end, len(heads))

    def _read(self, block: np.ndarray, end: int, num_scored: int) -> HeadScores:
        """Reads the text up to this position, and a block after it."""
        positions = np.arange(self._end, end)
        self._make_room(len(positions))
        found = self._step(
            BlockRows(
                block,
                self._target.store.get(positions),
                self._end,
                self._end - self._first,
                WINDOW,
                num_scored,
            )
        )
        self._end = end
        return found

    def _make_room(self, count: int) -> None:
        """Makes room for more entries. A text of twice the window is cut to it."""
        surplus = self._end - self._first - WINDOW
        if surplus > WINDOW:
            self._cache = self._cache[..., surplus:, :].copy()
            self._first += surplus
        missing = self._end - self._first + count - self._cache.shape[3]
        if missing > 0:
            grown = max(missing, _ROWS_AT_ONCE)
            self._cache = np.pad(self._cache, [(0, 0)] * 3 + [(0, grown), (0, 0)])
        if surplus > WINDOW or missing > 0:
            self._step = self._network.bound_to(self._cache)

    def _forget(self, end: int) -> None:
        """Forgets the entries from this position on."""
        self._end = max(min(self._end, end), self._first)
        if self._end == self._first:
            self._first = self._end = 0
