"""Verifies whatever is drafted, up to 7 tokens: for proofs, where a wrong draft token tells as
much."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.policy import FixedPolicy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.drafters.protocol import Budget, Drafter

_MAX_DRAFT_TOKENS = 7  # unlikely draft tokens after unlikely ones cost much and show little


class AlwaysVerifyPolicy:
    """Draft tokens are verified however unlikely they are; several drafters take turns to go
    first."""

    def __init__(self, max_draft_tokens: int, branches: bool, probes: bool) -> None:
        self._all = FixedPolicy(min(max_draft_tokens, _MAX_DRAFT_TOKENS), 0.0, branches, probes)
        self._turn = 0

    def begin(self) -> None: ...

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        first = self._turn % max(1, len(drafters))
        self._turn += 1
        return self._all.choose([*drafters[first:], *drafters[:first]], pending, budget)

    def wants(self, drafter: Drafter) -> bool:
        return True

    def observe(self, round_stats: RoundStats) -> None: ...
