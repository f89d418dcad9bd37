"""The default policy asks and verifies in every round what wins most, by what was measured.

A round that commits n tokens in s seconds is worth n - rate * s, in tokens: rate is that of the
last rounds, since time could have been spent on those. To choose what is worth most in each round
maximizes tokens a second over all of them (Dinkelbach 1967, On nonlinear fractional programming),
where the best ratio round by round would not. Seconds come from t(k), measured and corrected by
every pass (RowCosts), tokens from what drafters say of their draft tokens, corrected by what came
of them (Calibration). Plain decoding is always among the choices; a drafter that loses against it
rests (Backoff).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_spec.control.backoff import (
    UNPROVEN_HEAD_LOSS,
    UNPROVEN_LOSS,
    WITH_COSTLY,
    WITH_FREE,
    Backoff,
    Baseline,
)
from edge_spec.control.calibration import Calibration, learn, reach_beside, reach_of
from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS, RoundPlan, limited
from edge_spec.control.tree_shape import KeptShape, plan_rows
from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.outliers import without_outlier
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Drafter

_MEMORY = 0.98  # weight of the rounds before, in means over rounds: about the last 50 count
_UNPROVEN_TOKENS = 2  # draft tokens a round of a drafter that nobody has shown to pay
# Of what the rows of a plan cost: another drafter that takes less is asked what it says of them.
# What other shares do: benchmarks/head_policy.py --checked.
_CHECKED = 0.2

_log = logging.getLogger(__name__)


class _Candidate(NamedTuple):
    """A drafter's proposal, and the tokens a second that it is expected to commit."""

    name: str
    tree: TokenTree
    reach: list[float]
    plan: RoundPlan
    rate: float


class AdaptivePolicy:
    """Asks drafters in their order until one has draft tokens that are worth their rows, and goes
    on to those whose rounds have been better than that, or that take little beside these rows.

    costs: of the target's rows; shared_costs: in passes that other conversations share, where each
    is charged its part. draft_token_s: seconds a draft token of drafters, where that is known.
    free: drafters that have nothing to catch up with. The same rounds with the same times make the
    same plans.
    """

    def __init__(
        self,
        costs: RowCosts,
        draft_token_s: Mapping[str, float],
        free: Collection[str] = (),
        max_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        branches: bool = True,
        probes: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        shared_costs: RowCosts | None = None,
    ) -> None:
        self.costs = self._own_costs = costs  # of the last round's kind of pass
        self._shared_costs = shared_costs or costs
        self.max_draft_tokens = max_draft_tokens
        self.branches = branches
        self.probes = probes
        self.calibrations: dict[str, Calibration] = {}  # by drafter
        self._clock = clock
        self._draft_token_s = {**dict.fromkeys(free, 0.0), **draft_token_s}
        self._free = free
        self._backoffs: dict[str, Backoff] = {}
        self._baseline = Baseline(costs.plain_rows)
        self._asked: dict[str, tuple[float, TokenTree]] = {}  # in this round: seconds, draft tokens
        self._chosen: str | None = None
        self._seconds = costs.at(1)
        self._tokens = 1.0
        self._kept_shape = KeptShape()
        self._around_s = 0.0  # of a round, outside drafting and the pass

    def begin(self) -> None:
        """A drafter that lost in the text before, and pays in most, is asked again."""
        for backoff in self._backoffs.values():
            backoff.begin_text()

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        self._asked.clear()
        self._chosen = None
        limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
        if not drafters:
            return RoundPlan(TokenTree.chain(pending), PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return RoundPlan(TokenTree.chain(pending), PlainReason.BUDGET)
        if not self.costs.is_scaled:  # what a step takes, the first ones tell
            return RoundPlan(TokenTree.chain(pending), PlainReason.BASELINE)
        if self._baseline.is_due:
            limits = self._within_plain_step(limits)
            if limits.num_draft_tokens <= 0:
                return RoundPlan(TokenTree.chain(pending), PlainReason.BASELINE)
        best: _Candidate | None = None
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            backoff = self._backoff(drafter)
            if backoff.resting:
                backoff.count()
                reason = PlainReason.COOLDOWN
                continue
            if best is not None and not self._is_asked_beside(best, backoff):
                continue
            worth = self._worth(backoff.draft_token_s)
            if worth >= 1:
                _log.info(
                    "%s rests: a draft token costs %.2f of a token's time", drafter.name, worth
                )
                backoff.rest(self._plain_s)
                reason = PlainReason.BELOW_BREAK_EVEN
                continue
            tree = self._ask(drafter, pending, limits, worth)
            reach = reach_of(self._calibration_of(drafter.name), tree)
            found = self._judged(drafter.name, tree, reach, limits)
            if found is not None and found.plan.tree.draft_probs:
                # Samples are not dropped for what they are, so not held against another plan.
                best = found
                break
            if best is not None:
                beside = reach_beside(best.tree, best.reach, tree, reach)
                best = self._judged(best.name, best.tree, beside, limits)
            best = max(filter(None, (best, found)), key=lambda each: each.rate, default=None)
            if len(tree) > 1:
                reason = PlainReason.BELOW_BREAK_EVEN
        self._chosen = best.name if best is not None else None
        return best.plan if best is not None else RoundPlan(TokenTree.chain(pending), reason)

    def wants(self, drafter: Drafter) -> bool:
        backoff = self._backoff(drafter)
        return not backoff.resting and self._worth(backoff.draft_token_s) < 1

    def observe(self, round_stats: RoundStats) -> None:
        self._use(self._shared_costs if round_stats.num_sharing > 1 else self._own_costs)
        if self.costs.is_scaled:
            self._baseline.observe(round_stats, self.costs.at(1))
            self.costs.observe(round_stats.num_rows, round_stats.forward_s)
        else:
            self.costs.observe(round_stats.num_rows, round_stats.forward_s)
            self._seconds = self.costs.at(1)
        # What drafters learn afterwards is left out: it costs the same in every round.
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        usual_s = self.costs.at(round_stats.num_rows) + self._around_s
        pass_s = without_outlier(round_stats.forward_s + around_s, usual_s)
        self._around_s += 0.05 * (without_outlier(around_s, usual_s) - self._around_s)
        asked_s = sum(seconds for seconds, _ in self._asked.values())
        self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * (pass_s + asked_s)
        self._tokens = _MEMORY * self._tokens + (1 - _MEMORY) * round_stats.num_tokens
        # A machine that slows down slows plain steps down as well, which shows later: no drafter is
        # to answer for the time between, so its rows are charged as they cost on average now.
        rows_s = self.costs.at(round_stats.num_rows) + self._around_s
        for name, (draft_s, tree) in self._asked.items():
            learn(self._calibration_of(name), tree, round_stats.tokens)
            backoff = self._backoffs[name]
            if self._chosen in (None, name):
                backoff.observe(rows_s + draft_s, round_stats.num_tokens, self._plain_s)
            else:  # it has cost its time, and another one has drafted
                backoff.unused(draft_s, self._plain_s)
            if backoff.resting:
                _log.info("%s rests: its rounds were slower than plain steps", name)
        self._asked.clear()  # the next round may be plain without asking this policy

    def _use(self, costs: RowCosts) -> None:
        """Goes on from what was measured in passes of this kind."""
        if costs is not self.costs:
            before_s = self._plain_s
            self.costs = costs
            self._seconds *= self._plain_s / before_s

    @property
    def _plain_s(self) -> float:
        """Returns the seconds of a plain round."""
        return self.costs.at(1) + self._around_s

    @property
    def _token_s(self) -> float:
        """Returns the seconds of a token at the better of the last rounds' rate and plain
        decoding's."""
        return min(self._seconds / self._tokens, self._plain_s)

    def _within_plain_step(self, limits: Budget) -> Budget:
        """Returns the limits of a pass that takes no longer than a plain step."""
        rows = min(limits.num_rows, self.costs.plain_rows)
        return replace(
            limits, num_rows=rows, num_draft_tokens=min(limits.num_draft_tokens, rows - 1)
        )

    def _is_asked_beside(self, best: _Candidate, backoff: Backoff) -> bool:
        """Says whether a drafter may have better draft tokens, or shows for little which of these
        are wrong (`reach_beside`)."""
        if backoff.rate > best.rate:
            return True
        rows_s = self.costs.at(len(best.plan.tree)) - self.costs.at(1)
        return backoff.asked_s < _CHECKED * rows_s

    def _worth(self, draft_token_s: float) -> float:
        """Returns how likely a draft token has to be: what it and its row cost, over the time of a
        token."""
        return (self.costs.slope + draft_token_s) / self._token_s

    def _judged(
        self, name: str, tree: TokenTree, reach: list[float], limits: Budget
    ) -> _Candidate | None:
        """The best plan with a drafter's tree, where there is one."""
        plan = plan_rows(tree, reach, limits, self.costs, self._token_s)
        if plan is None:
            return None
        # What all that were asked have taken is spent, whoever drafts.
        spent_s = sum(seconds for seconds, _ in self._asked.values())
        expected = sum(plan.values) or sum(reach_of(self._calibration_of(name), plan.tree))
        seconds = self.costs.at(len(plan.tree)) + self._around_s + spent_s
        return _Candidate(name, tree, reach, plan, expected / seconds)

    def _ask(self, drafter: Drafter, pending: int, limits: Budget, worth: float) -> TokenTree:
        """Asks for one draft token where it is not known what that takes, and for few where nothing
        has shown that they are of use."""
        backoff = self._backoff(drafter)
        most = limits.num_draft_tokens if backoff.is_proven else _UNPROVEN_TOKENS
        most = min(most, max(1, backoff.texts.draft_tokens(worth)))
        asked = Budget(
            min(limits.num_draft_tokens, most) if backoff.measured else 1,
            limits.num_rows,
            limits.branches,
            limits.probes,
            min_reach=worth,
            free_rows=self.costs.plain_rows,
            shape=self._shape(drafter, limits) if backoff.measured else (),
        )
        start = self._clock()
        tree = drafter.propose(pending, asked)
        was_measured = backoff.measured
        taken_s = backoff.drafted(len(tree) - 1, self._clock() - start)
        if backoff.measured and not was_measured and self._is_expected_to_pay(drafter):
            backoff.trust()
        self._asked[drafter.name] = taken_s, tree
        return tree

    def _is_expected_to_pay(self, drafter: Drafter) -> bool:
        """Forecasts it by what is reported of its draft tokens and what they cost."""
        draft_token_s = self._backoff(drafter).draft_token_s
        reach, tokens = 1.0, 1.0
        for depth, chance in enumerate(drafter.reported_acceptance, start=1):
            reach *= chance
            tokens += reach
            seconds = self.costs.at(depth + 1) + self._around_s + depth * draft_token_s
            if seconds < tokens * self._plain_s:
                return True
        return False

    def _backoff(self, drafter: Drafter) -> Backoff:
        if drafter.name not in self._backoffs:
            patience, first_loss = WITH_FREE, None
            if drafter.name not in self._free:
                patience = WITH_COSTLY
                first_loss = UNPROVEN_HEAD_LOSS if drafter.traits.head else UNPROVEN_LOSS
            backoff = Backoff(self._draft_token_s.get(drafter.name), patience, first_loss)
            self._backoffs[drafter.name] = backoff
            if backoff.measured and first_loss is not None and drafter.reported_acceptance:
                (backoff.trust if self._is_expected_to_pay(drafter) else backoff.doubt)()
        return self._backoffs[drafter.name]

    def _calibration_of(self, name: str) -> Calibration:
        return self.calibrations.setdefault(name, Calibration())

    def _shape(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Returns the shape of a tree that samples are to fill."""
        acceptance = () if not limits.branches else drafter.sibling_acceptance()
        if not acceptance:
            return ()
        pass_s = self._draft_token_s.get(drafter.name, self._backoff(drafter).draft_token_s)
        room = (limits.num_rows, limits.num_draft_tokens)
        return self._kept_shape.fitting(acceptance, self.costs, pass_s, *room)
