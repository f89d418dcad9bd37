"""Grows a tree of draft tokens best first: the rows that are likeliest to be reached and right,
and merges several trees in one: shared beginnings once, no two equal siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import Budget

State = TypeVar("State")

# Rows below the budget's min_reach that are proposed all the same: policies drop them, but the
# text decides them too, which is how a drafter learns that they have become likelier.
_UNLIKELY_ROWS = 3


class Candidate(NamedTuple, Generic[State]):
    """A token that may follow, the kind of draft token it is, and the state that it leads to."""

    token: int
    kind: int
    state: State


Expand = Callable[[State], Iterable[Candidate[State]]]


class Growth:
    """Holds what a drafter proposed in a round, and the kind of each row's draft token; None for
    rows that it learns nothing from."""

    def __init__(self, tree: TokenTree, kinds: Sequence[int | None]) -> None:
        self.tree = tree
        self._kinds = kinds  # the pending token's is not read
        self._taught = False

    def teach(self, acceptance: LearntAcceptance, text: Iterable[int]) -> None:
        """Counts every draft token that the text after the pending token decides, once: in a round
        without a proposal the one before it says nothing."""
        if not self._taught:
            self._taught = True
            for row, right in self.tree.followed(text):
                kind = self._kinds[row]
                if kind is not None:
                    acceptance.observe(kind, right)


def nothing(pending: int) -> Growth:
    return Growth(TokenTree.chain(pending), (0,))


def grow(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    root: State,
    expand: Expand[State],
    most_expanded: int | None = None,
) -> Growth:
    """A tree within the budget, in the order of falling chance that a row is reached and right.

    expand: what may follow a state, in no order and without equal tokens; asked for once a row, and
    for `most_expanded` rows at most.
    """
    if not budget.branches:
        return _grow_chain(drafter, pending, budget, acceptance, root, expand)
    tokens, parents, kinds = [pending], [-1], [0]
    confidence, reach, depth = [1.0], [1.0], [0]
    frontier: list[tuple[float, int, int, float, Candidate[State]]] = []
    pushed = expanded = 0
    worth_scoring = budget.worth_scoring

    def push(row: int, state: State) -> None:
        nonlocal pushed, expanded
        if depth[row] == budget.num_draft_tokens or expanded == most_expanded:
            return
        expanded += 1
        rated = [(acceptance.estimate(candidate.kind), candidate) for candidate in expand(state)]
        if len(rated) > 1:
            rated.sort(key=lambda pair: -pair[0])
        left = 1.0  # siblings exclude each other
        for estimate, candidate in rated:
            estimate = min(estimate, left)
            left -= estimate
            chance = reach[row] * estimate
            heappush(frontier, (-chance, pushed, row, estimate, candidate))
            pushed += 1
            if chance < worth_scoring:
                break  # one to learn from is enough: its siblings are even less likely

    unlikely = 0
    push(0, root)
    while frontier and len(tokens) < budget.num_rows and unlikely < _UNLIKELY_ROWS:
        negative, _, parent, estimate, candidate = heappop(frontier)
        row = len(tokens)
        tokens.append(candidate.token)
        parents.append(parent)
        kinds.append(candidate.kind)
        confidence.append(estimate)
        reach.append(-negative)
        depth.append(depth[parent] + 1)
        unlikely += -negative < worth_scoring
        if -negative >= budget.min_reach and len(tokens) < budget.num_rows:
            push(row, candidate.state)
    return Growth(_tree(drafter, tokens, parents, confidence), kinds)


def _grow_chain(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    root: State,
    expand: Expand[State],
) -> Growth:
    """The same without branches, which has no need of an order."""
    tokens: list[int] = []
    kinds: list[int | None] = [0]
    confidence: list[float] = []
    state, reach = root, 1.0
    for _ in range(min(budget.num_draft_tokens, budget.num_rows - 1)):
        best, most = None, -1.0
        for candidate in expand(state):
            estimate = acceptance.estimate(candidate.kind)
            if estimate > most:
                best, most = candidate, estimate
        if best is None:
            break
        tokens.append(best.token)
        kinds.append(best.kind)
        confidence.append(most)
        reach *= most
        if reach < budget.min_reach and len(tokens) + 1 >= budget.free_rows:
            break
        state = best.state
    return Growth(TokenTree.chain(pending, tokens, confidence, drafter), kinds)


def _tree(
    drafter: str, tokens: list[int], parents: list[int], confidence: list[float]
) -> TokenTree:
    if len(tokens) == 1:
        return TokenTree.chain(tokens[0])
    return TokenTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(confidence, np.float32),
        proposed_by=("", *(drafter,) * (len(tokens) - 1)),
    )


class MergedRow:
    """A row of the result: its token, its parent's row, and the rows that it stands for."""

    def __init__(self, token: int, parent: int) -> None:
        self.token = token
        self.parent = parent
        self.sources: list[tuple[int, int]] = []  # (which tree, its row)
        self.drafters: list[str] = []
        self.required = False


def merge_rows(pending: int, trees: Sequence[TokenTree]) -> list[MergedRow]:
    """The rows of all trees, parents first. Every path of every tree is a path of the result, and
    no row has two children with the same token."""
    merged = [MergedRow(pending, -1)]
    rows: dict[tuple[int, int], int] = {}
    for which, tree in enumerate(trees):
        drafters = tree.proposed_by or ("",) * len(tree)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        new_row = [0]
        for row in range(1, len(tree)):
            place = new_row[parents[row]], tokens[row]
            if place not in rows:
                rows[place] = len(merged)
                merged.append(MergedRow(token=place[1], parent=place[0]))
            new_row.append(rows[place])
            entry = merged[rows[place]]
            entry.sources.append((which, row))
            if drafters[row] not in entry.drafters:
                entry.drafters.append(drafters[row])
            entry.required |= bool(tree.required and tree.required[row])
    return merged


def tree_of(merged: Sequence[MergedRow], confidence: Sequence[float]) -> TokenTree:
    """confidence: of each row, the pending one's not read; siblings' are scaled to a sum of 1
    where they exceed it, since at most one of them is right."""
    below = [0.0] * len(merged)
    for row, entry in enumerate(merged):
        if row:
            below[entry.parent] += confidence[row]
    scaled = [
        confidence[row] / max(1.0, below[entry.parent]) if row else 1.0
        for row, entry in enumerate(merged)
    ]
    required = tuple(entry.required for entry in merged)
    return TokenTree(
        np.array([entry.token for entry in merged], np.int32),
        np.array([entry.parent for entry in merged], np.int32),
        np.array(scaled, np.float32),
        proposed_by=tuple("+".join(entry.drafters) for entry in merged),
        required=required if any(required) else (),
    )
