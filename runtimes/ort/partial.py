"""Sessions that are a part of their target and share its KV cache: self-speculation.

Early exit: Elhoushi et al. 2024 (LayerSkip). Layer skipping: Zhang et al. 2023 (Draft & Verify),
Xia et al. 2024 (SWIFT). A part writes after what its target has committed, and the target's next
pass overwrites that in every layer; so it cannot change what the target scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.model import Forward, Session, require_rollback
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.runtimes.ort.passes import Passes


class PartialSession:
    """peers: all parts of `target`, which may include this one."""

    def __init__(self, passes: Passes, target: Session, peers: list[PartialSession]) -> None:
        assert passes.runs is not None
        self.length = target.length
        self._passes = passes
        self._runs = passes.runs
        self._target = target
        self._peers = peers

    @property
    def skipped(self) -> frozenset[int]:
        """Sublayers that are left out: 2 * layer its attention, 2 * layer + 1 its MLP.

        May be set between passes, at no cost. Raises UsageError for one that does not exist.
        """
        return frozenset(np.flatnonzero(~self._runs).tolist())

    @skipped.setter
    def skipped(self, skipped: frozenset[int]) -> None:
        unknown = skipped.difference(range(len(self._runs)))
        if unknown:
            raise UsageError(
                f"the model has no sublayer {min(unknown)}",
                remedy=f"Choose from 0 to {len(self._runs) - 1}.",
            )
        self._runs[:] = True
        self._runs[list(skipped)] = False

    def prefill(self, tokens: Sequence[int]) -> None:
        self._claim()
        for length, _ in self._passes.prefill(tokens, self.length):
            self.length = length

    def forward(self, tree: TokenTree) -> Forward:
        self._claim()
        return self._passes.score(tree, self.length)

    def commit(self, rows: Sequence[int]) -> None:
        self._passes.keep(rows, self.length)
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        """Rolls back to any length that this session or its target has reached."""
        require_rollback(max(self.length, self._target.length), length)
        self.length = length

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        """[2 * layers] float64: 1 - cosine similarity of the residual stream before and after each
        sublayer, with none left out; mean over `tokens` after the committed ones.

        Block influence: Men et al. 2024, ShortGPT. Commits nothing. Raises ContextFullError.
        """
        self._claim()
        runs = self._runs.copy()
        self._runs[:] = True
        turned = np.zeros(len(runs))
        try:
            for before, *updates in self._passes.updates(tokens, self.length):
                for sublayer, update in enumerate(updates):
                    after = before + update
                    turned[sublayer] += np.sum(1 - _cosines(before, after))
                    before = after
        finally:
            self._runs[:] = runs
        return turned / len(tokens)

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
        self._passes.close()

    def _claim(self) -> None:
        """Makes the tokens after the own length this session's.

        Raises ValueError where the target has committed them.
        """
        if self.length < self._target.length:
            raise ValueError(
                f"a pass at {self.length} tokens would overwrite some of the "
                f"{self._target.length} that the target has committed"
            )
        for peer in self._peers:
            peer.length = min(peer.length, self.length)


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cosine of each row; [rows, hidden] float32 -> [rows] float64."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    similar: np.ndarray = np.sum(a * b, axis=1) / np.sqrt(
        np.sum(a * a, axis=1) * np.sum(b * b, axis=1)
    )
    return similar
