"""Grows a tree of draft tokens best first: the rows that are likeliest to be reached and right."""

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
) -> Growth:
    """A tree within the budget, in the order of falling chance that a row is reached and right.

    expand: what may follow a state, in no order and without equal tokens; asked for once a row.
    """
    if not budget.branches:
        return _grow_chain(drafter, pending, budget, acceptance, root, expand)
    tokens, parents, kinds = [pending], [-1], [0]
    confidence, reach, depth = [1.0], [1.0], [0]
    frontier: list[tuple[float, int, int, float, Candidate[State]]] = []
    pushed = 0

    def push(row: int, state: State) -> None:
        nonlocal pushed
        if depth[row] == budget.num_draft_tokens:
            return
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
            if chance < budget.min_reach:
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
        if -negative < budget.min_reach:
            unlikely += 1
        elif len(tokens) < budget.num_rows:
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
