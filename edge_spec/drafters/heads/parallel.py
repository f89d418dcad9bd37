"""Drafts with a P-EAGLE head (Hui et al. 2026): an EAGLE head that scores several tokens in one
pass. The rows after the pending token's read a mask token beside features that were learnt for it,
so no draft token waits for the one before, and none depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge_spec.core.heads import EntryRows, HeadScores
from edge_spec.drafters.heads.block import BlockDrafter
from edge_spec.drafters.heads.eagle_session import WINDOW
from edge_spec.drafters.heads.independent import head_scores
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Cost, DrafterTraits


class ParallelEagleDrafter(BlockDrafter):
    """network: of a head that has `EagleHead.masks`; drafters of several conversations share it.

    The entry of feature i, which token i + 1 is read beside, lies at position i + 1 of the text.
    """

    traits = DrafterTraits(trees=True, cost=Cost.PASS, target_session=True, head="eagle")
    _tokens_after = 1

    def __init__(self, network: EagleNetwork, name: str = "eagle") -> None:
        assert network.masks is not None
        self._network, self._masks = network, network.masks
        super().__init__(network, network, name, min(WINDOW, network.window or WINDOW))

    def _bind(self, cache: np.ndarray) -> None:
        self._step = self._network.bound_to(cache)

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        self._forget(len(self._target.text) - 2)  # the pending token's entry is scored anyway
        return super()._ask(heads)

    def _extra_rows(self, num_asked: int) -> int:
        return max(num_asked - 1, 0)

    def _read(self, start: int, end: int, num_asked: int) -> HeadScores:
        known, masks = end - start, self._extra_rows(num_asked)
        tokens = [*self._target.text[start + 1 : end + 1], *[self._masks.token] * masks]
        features = self._target.store.get(np.arange(start, end))
        count, first_slot = known + masks, start - self._first
        slots = np.arange(first_slot, first_slot + count)[:, None]
        seen = np.arange(first_slot + count)
        sees = (seen <= slots) & (seen > slots - self._window)
        _, logits = self._step(
            EntryRows(
                self._network.embed(np.array(tokens)),
                np.concatenate([features, np.repeat(self._masks.features[None], masks, axis=0)]),
                np.empty((0, self._network.config.hidden_size), np.float32),
                np.arange(count),
                np.arange(start + 1, start + 1 + count),
                first_slot,
                None if sees.all() else sees,
                np.arange(known - 1, count),  # a step scores something, if only to read
            )
        )
        found = head_scores(logits)
        return replace(found, likeliest=self._network.targets(found.likeliest))
