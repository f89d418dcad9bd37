"""Describes what an answer may be: a constraint says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edge_spec.core.tree import TokenTree


class Constraint(Protocol):
    """Follows one answer token by token. Used by one thread at a time."""

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        """[vocab] bool: what may come after the output and `path`; everything where `path` itself
        may not, since nothing after it is ever written."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Says how many of `tokens` may be written, one after the other, after the output."""

    def forced(self) -> list[int]:
        """Tokens that spell what has to come next; they need not be the ones that are written."""

    def observe(self, tokens: Sequence[int]) -> None:
        """These are now part of the output."""


def permitted(tree: TokenTree, constraint: Constraint) -> TokenTree:
    """The tree without draft tokens that cannot be accepted, and without what is below them.

    Sampled rows stay, since dropping one for what it is would change the distribution, and so do
    trees with rows that are needed, which are scored for what their drafter learns from them.
    """
    if len(tree) == 1 or tree.required or any(probs is not None for probs in tree.draft_probs):
        return tree
    if tree.is_chain:
        return tree.first_rows(1 + constraint.num_allowed(tree.tokens[1:].tolist()))
    kept = [0]
    for row in range(1, len(tree)):
        if int(tree.parents[row]) in kept:
            path = tree.tokens[tree.path(row)[1:]].tolist()
            if constraint.num_allowed(path) == len(path):
                kept.append(row)
    return tree.select(kept)
