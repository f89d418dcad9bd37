"""Drafts with a DFlash head (z-lab), which drafts a block in one pass, or a DSpark head (DeepSeek),
which also weighs each token by the ones before it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import exp

import numpy as np

from edge_spec.core.heads import BlockRows, DFlashHead
from edge_spec.drafters.draft.draft_tree import FIRST, kind_of
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores, rows_of
from edge_spec.drafters.heads.features import TextEntries
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import TRAITS

_KEPT_ROWS = 1024  # tokens: 1 MB


class TransitionWeights:
    """A head's transitions, read from its file row by row."""

    def __init__(self, head: DFlashHead) -> None:
        self._transitions, self._confidence = head.transitions, head.confidence
        self._row = lru_cache(_KEPT_ROWS)(self._read)

    def weighed(self, row: RowScores, last: int) -> tuple[RowScores, np.ndarray]:
        """Reweigh a row's likeliest tokens after the token `last`; also return the biases added to
        their logits."""
        assert row.likeliest is not None and row.shares is not None
        if self._transitions is None:
            return row, np.zeros(len(row.likeliest), np.float32)
        biases: np.ndarray = self._transitions.scored(row.likeliest) @ self._row(last)
        peak = max(0.0, float(biases.max(initial=0.0)))
        powers = row.shares * np.exp(biases - peak)
        others = max(0.0, 1 - float(row.shares.sum())) * np.exp(-peak)
        shares = powers / (powers.sum() + others)
        order = np.argsort(-shares, kind="stable")
        return row._replace(likeliest=row.likeliest[order], shares=shares[order]), biases

    def chance(self, token: int, state: np.ndarray | None) -> float | None:
        """Return the predicted acceptance of the token after this one; None if the head has
        none."""
        if self._confidence is None or state is None:
            return None
        weight = self._confidence.weight
        read = state if len(weight) == len(state) else np.concatenate([state, self._row(token)])
        logit = float(weight @ read + self._confidence.bias)
        return 1 / (1 + exp(min(-logit, 80.0)))

    def _read(self, token: int) -> np.ndarray:
        if self._transitions is None:
            return np.empty(0, np.float32)
        row: np.ndarray = self._transitions.after(np.array([token]))[0]
        return row


class DFlashDrafter(HeadDrafter):
    """Drafts with a DFlash or DSpark head. network: may be shared by conversations."""

    traits = TRAITS["dflash"]
    _target: TextEntries

    def __init__(self, network: LayersNetwork) -> None:
        head = network.head
        assert isinstance(head, DFlashHead)
        super().__init__(network, TextEntries(network), len(head.scored))
        self._network, self._scored = network, head.scored
        self._masks = network.embed(np.full(head.block_size - 1, head.mask_token))
        weighs = head.transitions is not None or head.confidence is not None
        self._transitions = TransitionWeights(head) if weighs else None

    def _decided_by(self, path: Path) -> Hashable:
        weights = self._transitions
        if weights is None:
            return super()._decided_by(path)
        return len(path), path[-1:]

    def _ranked(self, row: RowScores, path: Path) -> list[tuple[int, int]]:
        weights = self._transitions
        if weights is None:
            return super()._ranked(row, path)
        last = path[-1] if path else self._pending
        weighed, biases = weights.weighed(row, last)
        if not self._chooser.reads_logits_alone:
            logits = row.logits.copy()
            logits[row.likeliest] += biases
            weighed = weighed._replace(logits=logits)
        found = super()._ranked(weighed, path)
        chance = weights.chance(last, row.state)
        if chance is not None and found:
            found[0] = found[0][0], kind_of(FIRST, chance)
        return found

    def _score_heads(self, heads: Sequence[int]) -> list[RowScores]:
        entries, text_end = self._target, len(self._target.text) - 1
        pending, first = self._network.embed(np.array([self._pending])), self._scored.start
        block = np.concatenate([pending, self._masks])
        for start, end in entries.missing():
            is_last = end == text_end
            rows = BlockRows(
                block if is_last else block[:1],
                self._target.store.get(start, end),
                start,
                start - entries.first,
                entries.window,
                range(first, first + len(heads) if is_last else first),
            )
            found = entries.step(rows)
        return rows_of(found, self._network.token_ids)
