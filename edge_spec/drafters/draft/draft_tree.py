"""Trees that a draft fills with samples, all rows of a level in one of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge_spec.core.tree import Siblings, TokenTree
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import Growth

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

    def select(self, rows: Sequence[int]) -> TokenTree:
        """Returns what the draft has to read: these rows, which contain the parents of each."""
        return TokenTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.ones(len(self.tokens), np.float32),
        ).select(rows)

    def grown(self, drafter: str, num_rows: int, sampled: bool = False) -> Growth:
        """The `num_rows` rows that are most likely to be reached and right."""
        tree = TokenTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.confidence, np.float32),
            draft_probs=tuple(self.draft_probs) if sampled else (),
            proposed_by=("", *(drafter,) * (len(self.tokens) - 1)),
            siblings=Siblings.WITHOUT_REPLACEMENT,
        )
        # Stable, and no row is likelier than its parent: parents come before their children.
        best = sorted(np.argsort(-np.array(self.reach), kind="stable")[:num_rows].tolist())
        return Growth(tree.select(best), [self.kinds[row] for row in best])


class Reader(NamedTuple):
    """Reads a tree with the draft. max_rows: of one pass."""

    score: Score
    max_rows: int


class Draw(NamedTuple):
    """Tokens sampled without replacement, in their order, and what the first was sampled from."""

    tokens: list[int]
    kinds: Sequence[int]  # of draft token
    probs: np.ndarray  # [vocab]


def sample_shape(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    reader: Reader,
    draw: Callable[[np.ndarray, Path, int], Draw],
) -> Growth:
    """Fills the budget's shape, as far as it fits, with samples.

    Where a distribution has fewer tokens than the shape has children, the others and what is
    below them are left out.
    """
    children = _fitting(budget, reader.max_rows)
    rows = Rows(pending)
    read: list[int] = []
    level = {0: 0}  # node of the shape -> row
    while True:
        inner = {node: row for node, row in level.items() if node in children}
        if not inner:
            return rows.grown(drafter, budget.num_rows, sampled=True)
        read = sorted([*read, *inner.values()])
        logits = reader.score(rows.select(read))
        level = {}
        for node, row in inner.items():
            drawn = draw(logits[read.index(row)], rows.path(row), len(children[node]))
            chance = 1.0
            for child, token, kind in zip(children[node], drawn.tokens, drawn.kinds, strict=False):
                # A sample counts only after those before it, which a policy must not drop alone.
                chance = min(chance, acceptance.estimate(kind))
                level[child] = rows.add(row, token, kind, chance, drawn.probs)


def _fitting(budget: Budget, max_read: int) -> dict[int, list[int]]:
    """The children of each node of the budget's shape that has any, within the budget and
    `max_read` nodes that have children."""
    children: dict[int, list[int]] = {}
    depths = {0: 0}
    for node, parent in enumerate(budget.shape[1:], start=1):
        fits = parent in children or len(children) < max_read
        deep = depths.get(parent, budget.num_draft_tokens) >= budget.num_draft_tokens
        if fits and not deep and len(depths) < budget.num_rows:
            depths[node] = depths[parent] + 1
            children.setdefault(parent, []).append(node)
    return children
