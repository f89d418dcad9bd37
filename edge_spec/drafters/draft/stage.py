"""Describes what drafts for a draft, so that it reads several tokens a pass: the next level of a
cascade."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.forwarding import DrafterGroup


class Stage(DrafterGroup):
    """Drafters that follow the text, and after it what the draft has written so far. Without any
    the draft writes every token in a pass of its own."""

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    def chain(self, last: int, num_draft_tokens: int) -> TokenTree:
        """Drafts a chain below `last`, the last token of the text and the draft tokens."""
        return TokenTree.chain(last)

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        """Tells what the draft has written in place of the tree that was drafted last.

        logits: [rows, vocab] of the draft, valid during this call."""
