"""Levels of drafters: each drafts for the draft above it, as that one does for the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import Policy
from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Forward, Model
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import Stage
from edge_spec.drafters.protocol import Budget, Drafter


def stage_of(model: Model, costs: RowCosts, drafters: Sequence[Drafter]) -> PolicyStage:
    """Returns the level that drafts for a draft whose rows cost `costs`."""
    policy = AdaptivePolicy(costs, {}, branches=False, probes=False)
    return PolicyStage(drafters, policy, model.capabilities.verified_rows)


class PolicyStage(Stage):
    """Asks what a policy chooses among drafters, by the costs of the draft that they draft for: a
    level that does not win anything there is left out by the same rule as for a target.

    max_rows: of one pass of the draft.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(drafters)
        self._policy = policy
        self._max_rows = max_rows
        self._clock = clock
        self._started = self._proposed = clock()

    def prepare(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            if self._policy.wants(drafter):
                drafter.prepare(prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._policy.begin(len(prompt))
        super().begin(prompt)

    def chain(self, last: int, num_draft_tokens: int) -> TokenTree:
        self._started = self._clock()
        budget = Budget(num_draft_tokens, self._max_rows, branches=False, probes=False)
        tree = self._policy.choose(self._drafters, last, budget).tree
        self._proposed = self._clock()
        return tree

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        now = self._clock()
        accepted = tuple(range(1, len(written)))
        verdict = Verdict(tuple(written), accepted, len(written) == len(tree))
        self._policy.observe(
            RoundStats(
                num_rows=len(tree),
                num_draft_tokens=len(tree) - 1,
                num_accepted=len(accepted),
                num_tokens=len(written),
                plain_reason=None,
                near_ties=0,
                draft_s=self._proposed - self._started,
                forward_s=now - self._proposed,
                total_s=now - self._started,
            )
        )
        self.extend_draft(tree, Forward(logits), verdict)
