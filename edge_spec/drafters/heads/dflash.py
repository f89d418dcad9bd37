"""Drafts with a DFlash head (z-lab): all tokens of a block in one pass.

A row of the block knows nothing of what the rows before it have drafted, so the tree holds the
likeliest paths by the product of the rows' own chances, as with Medusa heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.dflash_network import DFlashNetwork
from edge_spec.drafters.heads.eagle_session import WINDOW
from edge_spec.drafters.heads.medusa import MedusaDrafter
from edge_spec.drafters.heads.target_features import TargetFeatures
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits

_ROWS_AT_ONCE = 256


class DFlashDrafter(MedusaDrafter):
    """network: of the head; drafters of several conversations share it."""

    traits = DrafterTraits(cost=Cost.PASS, target_session=True, head="dflash")

    def __init__(self, network: DFlashNetwork, name: str = "dflash") -> None:
        super().__init__(network, name)
        self._block = network
        self._target = TargetFeatures(network.feature_layers, network.features_size, WINDOW)
        config = network.config
        heads, size = config.num_kv_heads, config.head_dim
        self._entries = np.empty((config.num_layers, 2, heads, 0, size), np.float32)
        self._first = 0  # the position of the first entry

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)
        self._keep(0)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._keep(self._target.begin(prompt))

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._state = None  # without any, nothing is drafted
        if self._target.is_ready and budget.num_draft_tokens > 0:
            self._catch_up()
            position = len(self._target.text) - 1
            self._state = self._block.block(pending, position, self._entries)
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._target.forget()
        self._keep(0)

    def close(self) -> None:
        self._target.close()
        super().close()

    def _catch_up(self) -> None:
        """Makes the entries that are missing of the target's features, those of the last WINDOW
        tokens."""
        store, end = self._target.store, len(self._target.text) - 1
        made = self._first + self._entries.shape[3]
        if made < max(store.first, end - 2 * WINDOW):  # what is between is not known any more
            self._entries = self._entries[:, :, :, :0]
            self._first = made = max(store.first, end - WINDOW)
        for start in range(made, end, _ROWS_AT_ONCE):
            positions = np.arange(start, min(start + _ROWS_AT_ONCE, end))
            found = self._block.entries(store.get(positions), positions)
            self._entries = np.concatenate([self._entries, found], axis=3)
        surplus = self._entries.shape[3] - WINDOW
        if surplus > 0:
            self._entries = self._entries[:, :, :, surplus:]
            self._first += surplus

    def _keep(self, end: int) -> None:
        """Forgets the entries from this position on."""
        self._entries = self._entries[:, :, :, : max(end - self._first, 0)]
        if not self._entries.shape[3]:
            self._first = 0
