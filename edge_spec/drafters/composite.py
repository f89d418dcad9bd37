"""Several drafters as one: their guesses in one tree, each row remembering who proposed it.

Drafters that agree are right more often than either says, and a drafter that another contradicts
less often; how much is learnt, so that the merged tree's confidence is calibrated too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.growth import Growth, nothing
from edge_spec.drafters.keeping import restore_into, snapshot_of
from edge_spec.drafters.merge import MergedRow, merge_rows, tree_of
from edge_spec.drafters.protocol import Budget, Closing, Drafter
from edge_spec.model import Forward
from edge_spec.tree import TokenTree, Verdict

_STEPS = 10  # buckets of what the drafters' own estimates come to together
_ALONE, _CONTESTED, _AGREED = range(3)  # no rival; a sibling that only others proposed; several
_PRIORS = tuple(
    min(0.98, factor * (step + 0.5) / _STEPS)
    for factor in (1.0, 0.85, 1.0)
    for step in range(_STEPS)
)


class CompositeDrafter:
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self._drafters = drafters
        self._acceptance = LearntAcceptance(_PRIORS)
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._growth = nothing(prompt[-1])
        for drafter in self._drafters:
            drafter.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        trees = [drafter.propose(pending, budget) for drafter in self._drafters]
        merged = merge_rows(pending, trees)
        if len(merged) == 1:
            return TokenTree.chain(pending)
        kinds = list(_kinds(merged, [tree.confidence.tolist() for tree in trees]))
        tree = tree_of(merged, [self._acceptance.estimate(kind) for kind in kinds])
        self._growth = Growth(tree, kinds)
        return tree if budget.branches else tree.best_chain()

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        for drafter in self._drafters:
            drafter.observe(tree, out, verdict)

    def close(self) -> None:
        for drafter in self._drafters:
            if isinstance(drafter, Closing):
                drafter.close()

    def snapshot(self) -> dict[str, np.ndarray]:
        return {"acceptance": self._acceptance.snapshot(), **snapshot_of(self._drafters)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self._acceptance.restore(state["acceptance"])
        restore_into(self._drafters, state)


def _kinds(merged: Sequence[MergedRow], confidence: Sequence[Sequence[float]]) -> Iterator[int]:
    """Of each row, the pending token's not read; confidence: of each tree's rows."""
    proposers: dict[int, set[str]] = {}  # of each row's children
    for entry in merged:
        proposers.setdefault(entry.parent, set()).update(entry.drafters)
    for entry in merged:
        together = 1 - prod(1 - confidence[which][row] for which, row in entry.sources)
        if len(entry.drafters) > 1:
            case = _AGREED
        elif len(proposers[entry.parent]) > 1:
            case = _CONTESTED
        else:
            case = _ALONE
        yield case * _STEPS + min(int(together * _STEPS), _STEPS - 1)
