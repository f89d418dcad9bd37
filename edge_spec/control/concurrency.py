"""Several conversations on one target: the more of them decode at once, the less each drafts.

Rows that are spare in a pass of one conversation are not spare when others need the same machine:
speculation wins less as a batch grows (Liu et al. 2024, Optimizing Speculative Decoding for Serving
Large Language Models Using Goodput). Row costs that are corrected by every round show that by
themselves; an upper bound on the rows of all holds before anything was measured. Another one is
what fits a pass that they share: who does not fit it would have to wait for the next one. Rows
that the pass itself deals out to all, by what they are worth, need no equal parts
(pass_requests.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.drafters.protocol import Budget, Cost, Drafter


class Concurrency:
    """Counts the generations that are decoding on one target now. Any thread may use it.

    rows_each: how many rows each may have in a pass that all share; None where there is none.
    rows_most: how many one may have where all others have one.
    """

    def __init__(self) -> None:
        self.active = 0
        self.rows_each: Callable[[], int | None] = lambda: None
        self.rows_most: Callable[[], int | None] = lambda: None
        self._lock = Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Counts one more within the block."""
        with self._lock:
            self.active += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1


class SharedPolicy:
    """Another policy's plans within this conversation's part of `num_rows` rows, equal for all that
    are active, one row at least: that is plain decoding; and within what fits shared passes."""

    def __init__(self, policy: Policy, load: Concurrency, num_rows: int | None = None) -> None:
        self._policy = policy
        self._load = load
        self._num_rows = num_rows
        self._is_divisible = False  # of its last plan that drafted, a pass may take the first rows

    def begin(self, num_prompt: int = 0) -> None:
        self._policy.begin(num_prompt)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        rows, left = budget.num_rows, budget.num_draft_tokens
        if self._num_rows is not None:
            rows = min(rows, max(1, self._num_rows // max(1, self._load.active)))
        if (fitting := self._fitting(drafters)) is not None:
            rows = min(rows, fitting)
        if rows < budget.num_rows:
            budget = replace(budget, num_rows=rows, num_draft_tokens=min(left, rows - 1))
        plan = self._policy.choose(drafters, pending, budget)
        if len(plan.tree) > 1:
            self._is_divisible = bool(plan.values)
        if plan.plain_reason is PlainReason.BUDGET and left > 0:
            return plan._replace(plain_reason=PlainReason.SHARED)
        return plan

    def _fitting(self, drafters: Sequence[Drafter]) -> int | None:
        """More than an equal part only where it costs nothing to draft what is not scored then."""
        if self._is_divisible and all(each.traits.cost is not Cost.PASS for each in drafters):
            return self._load.rows_most()
        return self._load.rows_each()

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        self._policy.observe(round_stats)

    def beliefs(self) -> str:
        return self._policy.beliefs()
