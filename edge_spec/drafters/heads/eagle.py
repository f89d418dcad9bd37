"""Drafts with an EAGLE head (Li et al. 2024, 2025), which reads its target's features.

A token's cache entry combines it and the feature of the token before. For a draft token the head's
last state replaces the unknown feature (Li et al. 2024, EAGLE, section 4.1), until the target has
computed it. A P-EAGLE head (Hui et al. 2026) scores several tokens in one pass: later rows read a
mask token and learnt features, so draft tokens do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.heads import EagleHead, EntryRows
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores, head_scores, rows_of
from edge_spec.drafters.heads.features import WINDOW, TextEntries
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import TRAITS

_FIRST = np.zeros(1, np.int64)  # of one row


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE head; conversations may share its network. Feature i, read together with
    token i + 1, has position i + 1 in the text."""

    traits = TRAITS["eagle"]
    _target: TextEntries

    def __init__(self, network: LayersNetwork) -> None:
        head = network.head
        assert isinstance(head, EagleHead)
        entries = TextEntries(network, min(WINDOW, head.window or WINDOW), tokens_after=1)
        super().__init__(network, entries, None if head.masks is None else head.masks.count)
        self._network, self._masks = network, head.masks
        self._made: dict[Path, tuple[int, np.ndarray]] = {}  # slot and state of draft tokens

    def take_features(self, position: int, features: np.ndarray) -> None:
        """Store [tokens, features_size] of the tokens from `position` on."""
        self._target.store.put(position, features)

    def _score_heads(self, heads: Sequence[int]) -> list[RowScores]:
        _, logits = self._read_text(len(heads) - 1)
        return rows_of(head_scores(logits), self._network.token_ids)

    def _score(self, path: Path) -> RowScores:
        entries, ids = self._target, self._network.token_ids
        if not path:
            states, logits = self._read_text()
            self._made = {(): (entries.num_slots - 1, states[-1])}
            return RowScores(logits[0], ids)
        entries.make_room(len(self._made))
        slot = entries.num_slots + len(self._made) - 1
        position = entries.first + entries.num_slots + len(path)
        sees = np.zeros(slot + 1, bool)
        sees[max(entries.num_slots + len(path) - entries.window, 0) : entries.num_slots] = True
        sees[[self._made[path[:count]][0] for count in range(len(path))]] = True
        sees[slot] = True
        states, logits = entries.step(
            EntryRows(
                self._network.embed(np.array(path[-1:])),
                np.empty((0, self._network.features_size), np.float32),
                self._made[path[:-1]][1][None],
                _FIRST,
                np.array([position]),
                slot,
                None if sees.all() else sees[None],
                _FIRST,
            )
        )
        self._made[path] = slot, states[0]
        return RowScores(logits[0], ids)

    def _read_text(self, num_masks: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Read the unread text and `num_masks` masks after it. Returns the last pass's states, and
        the logits of the pending token and the masks."""
        entries, network = self._target, self._network
        text, masks = entries.text, self._masks
        entries.forget(len(text) - 2)  # the pending token's entry is scored anyway
        for start, end in entries.missing(num_masks):
            more = num_masks if end == len(text) - 1 else 0
            tokens, features = text[start + 1 : end + 1], entries.store.get(start, end)
            if masks is not None:
                tokens += [masks.token] * more
                features = np.concatenate([features, np.repeat(masks.features[None], more, axis=0)])
            num_rows, first_slot = len(tokens), start - entries.first
            slots = np.arange(first_slot, first_slot + num_rows)[:, None]
            seen = np.arange(first_slot + num_rows)
            sees = (seen <= slots) & (seen > slots - entries.window)
            found: tuple[np.ndarray, np.ndarray] = entries.step(
                EntryRows(
                    network.embed(np.array(tokens)),
                    features,
                    np.empty((0, network.config.hidden_size), np.float32),
                    np.arange(num_rows),
                    np.arange(start + 1, start + 1 + num_rows),
                    first_slot,
                    None if sees.all() else sees,
                    np.arange(num_rows - more - 1, num_rows),  # a step must score something
                )
            )
        return found
