"""Trees that a draft grows level by level, all rows of a level in one of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.growth import Growth, Guess
from edge_spec.drafters.protocol import Budget
from edge_spec.tree import Siblings, TokenTree

Path = tuple[int, ...]
Score = Callable[[TokenTree], np.ndarray]  # [rows, vocab] logits


class Rows:
    """A tree that grows: row 0 is the pending token."""

    def __init__(self, pending: int) -> None:
        self.tokens = [pending]
        self.parents = [-1]
        self.kinds: list[int | None] = [None]
        self.confidence = [1.0]
        self.reach = [1.0]
        self.draft_probs: list[np.ndarray | None] = [None]

    def add(
        self, parent: int, token: int, kind: int, chance: float, probs: np.ndarray | None = None
    ) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.confidence.append(chance)
        self.reach.append(self.reach[parent] * chance)
        self.draft_probs.append(probs)
        return len(self.tokens) - 1

    def path(self, row: int) -> Path:
        path: list[int] = []
        while row:
            path.append(self.tokens[row])
            row = self.parents[row]
        return tuple(path[::-1])

    def only(self, rows: Sequence[int]) -> TokenTree:
        """What the draft has to read: these rows, which contain the parents of each."""
        return TokenTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.ones(len(self.tokens), np.float32),
        ).only(rows)

    def grown(self, drafter: str, sampled: bool = False) -> Growth:
        tree = TokenTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.confidence, np.float32),
            draft_probs=tuple(self.draft_probs) if sampled else (),
            proposed_by=("", *(drafter,) * (len(self.tokens) - 1)),
            siblings=Siblings.WITHOUT_REPLACEMENT,
        )
        return Growth(tree, self.kinds)


def grow_levels(
    drafter: str,
    pending: int,
    budget: Budget,
    width: int,
    acceptance: LearntAcceptance,
    score: Score,
    expand: Callable[[np.ndarray, Path], list[Guess[Path]]],
) -> Growth:
    """At each level the `width` likeliest rows of the level before it are written on (Li et al.
    2024, EAGLE-2: expand); which of all rows are verified is for the policy to say (rerank)."""
    rows = Rows(pending)
    read: list[int] = []
    level = [0]
    for _ in range(budget.num_draft_tokens):
        level = sorted(level, key=lambda row: -rows.reach[row])[:width]
        level = sorted(row for row in level if rows.reach[row] >= budget.min_reach)
        if not level:
            break
        read = sorted([*read, *level])
        logits = score(rows.only(read))
        below: list[int] = []
        for row in level:
            for guess in expand(logits[read.index(row)], rows.path(row)):
                chance = acceptance.estimate(guess.kind)
                below.append(rows.add(row, guess.token, guess.kind, chance))
                if rows.reach[below[-1]] < budget.min_reach:
                    break  # one to learn from is enough
        level = below
    return rows.grown(drafter)


class Draw(NamedTuple):
    """Tokens sampled without replacement, in their order, and what the first was sampled from."""

    tokens: list[int]
    probs: np.ndarray  # [vocab]


def sample_shape(
    drafter: str,
    pending: int,
    shape: Sequence[int],
    acceptance: LearntAcceptance,
    first_kind: int,
    score: Score,
    draw: Callable[[np.ndarray, Path, int], Draw],
) -> Growth:
    """Fills a static tree with samples. shape: parents of its rows, siblings in their order;
    first_kind: the kind of a first child, those of others follow it.

    Where a distribution has fewer tokens than the shape has children, the others and what is
    below them are left out.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(shape):
        children.setdefault(parent, []).append(node)
    rows = Rows(pending)
    read: list[int] = []
    level = {0: 0}  # node of the shape -> row
    while True:
        inner = {node: row for node, row in level.items() if node in children}
        if not inner:
            return rows.grown(drafter, sampled=True)
        read = sorted([*read, *inner.values()])
        logits = score(rows.only(read))
        level = {}
        for node, row in inner.items():
            drawn = draw(logits[read.index(row)], rows.path(row), len(children[node]))
            for rank, (child, token) in enumerate(zip(children[node], drawn.tokens, strict=False)):
                kind = first_kind + rank
                chance = acceptance.estimate(kind)
                level[child] = rows.add(row, token, kind, chance, drawn.probs)
