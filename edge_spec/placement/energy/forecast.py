"""What ways to draft would draw: the joules of measured passes in the place of their seconds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import Stats
from edge_spec.placement.drafting import CONTEXT_STEP, pass_costs
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile
from edge_spec.placement.replay import PassCost


def step_power_w(profile: Profile) -> float:
    """Returns the machine's power in a plain step. What is not measured for itself, between passes
    and in drafters without a model, is taken to draw as much: less would be a guess."""
    return profile.joules(TYPICAL_TOKENS).at(1) / profile.costs(TYPICAL_TOKENS).at(1)


def pass_joules(profile: Profile) -> PassCost:
    """Returns what tells the joules of a pass where `pass_costs` tells its seconds."""
    power_w = step_power_w(profile)

    @cache
    def joules_at(step: int) -> RowCosts:
        return profile.joules(step * CONTEXT_STEP)

    def pass_j(rows: int, context_tokens: int) -> float:
        around_s = rows * profile.logits_row_s + profile.commit_s
        return joules_at(context_tokens // CONTEXT_STEP).at(rows) + around_s * power_w

    return pass_j


class MeteredPasses:
    """A `PassCost`, in seconds, that adds up what its passes draw. Of a profile that
    `tells_energy`, else nothing is known."""

    def __init__(self, profile: Profile) -> None:
        self._seconds = pass_costs(profile)
        self._joules = pass_joules(profile) if profile.tells_energy else None
        self._power_w = step_power_w(profile) if profile.tells_energy else 0.0
        self._drawn_j = 0.0

    def __call__(self, rows: int, context_tokens: int) -> float:
        if self._joules is not None:
            self._drawn_j += self._joules(rows, context_tokens)
        return self._seconds(rows, context_tokens)

    def joules_per_token(self, stats: Iterable[Stats]) -> float | None:
        """stats: of all that was decoded by these passes, in their seconds."""
        if self._joules is None:
            return None
        every = list(stats)
        around_s = sum(each.predicted_ms - each.verify_ms for each in every) / 1e3
        drawn_j = self._drawn_j + around_s * self._power_w
        return drawn_j / max(1, sum(each.predicted_n for each in every))
