"""The default policy asks and verifies in every round what wins most, by what was measured.

A round that commits n tokens in s seconds is worth n - rate * s, in tokens: rate is that of the
last rounds, since time could have been spent on those. To choose what is worth most in each round
maximizes tokens a second over all of them (Dinkelbach 1967, On nonlinear fractional programming),
where the best ratio round by round would not. Seconds come from t(k), measured and corrected by
every pass (RowCosts), tokens from what drafters say of their draft tokens, corrected by what came
of them (Calibration). Plain decoding is always among the choices.

Whether a drafter is asked at all depends on what asking it has brought, in this text and in those
before (TextGains): as long as there is hope, and an account pays for the worst that the round could
bring (RegretAccount). One that is not asked does not observe rounds either, as far as it can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_spec.control.calibration import learn, reach_beside, reach_of
from edge_spec.control.cost import RowCosts
from edge_spec.control.gains import REPORTED, TextGains
from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS, RoundPlan, limited
from edge_spec.control.regret import RegretAccount
from edge_spec.control.round_seconds import RoundSeconds
from edge_spec.control.standing import Standing
from edge_spec.control.tree_shape import KeptShape, plan_rows
from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Drafter

_EXPECTED = 0.05  # plain steps that a round of an unknown drafter gains
# Of what the rows of a plan cost: another drafter that takes less is asked what it says of them.
# What other shares do: benchmarks/head_policy.py --checked.
_CHECKED = 0.2


class _Candidate(NamedTuple):
    """A drafter's proposal, the tokens that it is expected to commit, and in which time."""

    name: str
    tree: TokenTree
    reach: list[float]
    plan: RoundPlan
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


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
        self.seconds = RoundSeconds(costs, shared_costs or costs)
        self.max_draft_tokens = max_draft_tokens
        self.branches = branches
        self.probes = probes
        self.account = RegretAccount()
        self.standings: dict[str, Standing] = {}  # by drafter
        self._clock = clock
        self._draft_token_s = {**dict.fromkeys(free, 0.0), **draft_token_s}
        self._asked: dict[str, tuple[float, TokenTree]] = {}  # in this round: seconds, draft tokens
        # Likewise: all that asking took, and what those caught up in that were not asked lately.
        self._asking_s = self._caught_up_s = 0.0
        self._chosen: str | None = None
        self._kept_shape = KeptShape()

    @property
    def costs(self) -> RowCosts:
        """Returns those of rows in the last round's kind of pass."""
        return self.seconds.costs

    def begin(self) -> None:
        """A drafter that lost in the text before, and pays in most, is asked again."""
        self.account.begin_text()
        for standing in self.standings.values():
            standing.begin_text()

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        self._asked.clear()
        self._chosen = None
        self._asking_s = self._caught_up_s = 0.0
        limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
        plain = TokenTree.chain(pending)
        if not drafters:
            return RoundPlan(plain, PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return RoundPlan(plain, PlainReason.BUDGET)
        if not self.costs.is_scaled:  # what a step takes, the first ones tell
            return RoundPlan(plain, PlainReason.BASELINE)
        best, reason = self._best(drafters, pending, limits)
        if best is not None:
            gain_s = best.tokens * self.seconds.plain_s - best.seconds
            if gain_s < (best.tokens - 1) * self.costs.plain_deviation_s:
                best, reason = None, PlainReason.BASELINE
        self._chosen = best.name if best is not None else None
        plan = best.plan if best is not None else RoundPlan(plain, reason)
        resting = [name for name, standing in self.standings.items() if not standing.attends]
        return plan._replace(resting=frozenset(resting)) if resting else plan

    def wants(self, drafter: Drafter) -> bool:
        standing = self._standing(drafter)
        if standing.resting or self._worth(standing.draft_token_s) >= 1:
            return False
        return standing.gains.hope >= 0

    def observe(self, round_stats: RoundStats) -> None:
        times = (round_stats.forward_s, round_stats.draft_s, round_stats.total_s)
        if math.isfinite(sum(times)):  # else of a clock that is broken
            self._observe(round_stats)
        # The next round may be plain without asking this policy.
        self._asked.clear()
        self._asking_s = self._caught_up_s = 0.0

    def _observe(self, round_stats: RoundStats) -> None:
        asked_s = self._caught_up_s + sum(seconds for seconds, _ in self._asked.values())
        watched_s = max(0.0, round_stats.draft_s - self._asking_s)
        watching_s = self.seconds.observe(round_stats, asked_s, watched_s)
        # A machine that slows down slows plain steps down as well, which shows later: rows are
        # charged as they cost on average now, and no drafter is to answer for the time between.
        rows_s = self.seconds.at(round_stats.num_rows)
        spent_s = rows_s + asked_s + watching_s
        self.account.settle(round_stats.num_tokens - spent_s / self.seconds.plain_s)
        self._learn(round_stats, rows_s, watching_s)

    def beliefs(self) -> str:
        row = self.costs.slope / self.costs.at(1)
        told = [f"a row costs {row:.2f} of a step"]
        for name, standing in self.standings.items():
            if found := standing.calibration.of_text:
                told.append(f"{name} is right {found[0]:.2f} ± {found[1]:.2f} of the time")
            if standing.resting:
                told.append(f"{name} rests for {standing.resting} rounds")
        return f"{', '.join(told)}, the account stands at {self.account.balance:.1f} steps"

    def _learn(self, round_stats: RoundStats, rows_s: float, watching_s: float) -> None:
        """Counts what asking each drafter has brought."""
        watching_s /= max(1, sum(standing.attends for standing in self.standings.values()))
        for name, (draft_s, tree) in self._asked.items():
            standing = self.standings[name]
            learn(standing.calibration, tree, round_stats.tokens)
            standing.observed(watching_s)
            seconds, tokens = draft_s + watching_s, 0  # it has cost its time, another has drafted
            if self._chosen in (None, name):
                seconds, tokens = seconds + rows_s, round_stats.num_tokens
                standing.drafted(seconds, tokens)
            rows = round_stats.num_rows if tokens else 1
            standing.gains.observe(tokens - seconds / self.seconds.plain_s, rows)

    def _best(
        self, drafters: Sequence[Drafter], pending: int, limits: Budget
    ) -> tuple[_Candidate | None, PlainReason]:
        """Asks drafters, and returns the best of what they propose, or why there is nothing."""
        best: _Candidate | None = None
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            standing = self._standing(drafter)
            standing.attends = False
            worth = self._worth(standing.draft_token_s)
            if self._rests(standing, worth):
                is_slow = worth >= 1 and not standing.missed_rounds
                reason = PlainReason.BELOW_BREAK_EVEN if is_slow else PlainReason.COOLDOWN
                standing.miss()
                continue
            standing.attends = True
            if best is not None and not self._is_asked_beside(best, standing):
                standing.missed_rounds += 1
                continue
            most = self._affordable(standing, limits)
            if most < 1:
                standing.miss()
                standing.attends = False
                reason = PlainReason.COOLDOWN
                continue
            tree = self._ask(drafter, pending, limits, most, worth)
            reach = reach_of(standing.calibration, tree)
            found = self._judged(drafter.name, tree, reach, limits)
            if found is not None and found.plan.tree.draft_probs:
                # Samples are not dropped for what they are, so not held against another plan.
                return found, reason
            if best is not None:
                beside = reach_beside(best.tree, best.reach, tree, reach)
                best = self._judged(best.name, best.tree, beside, limits)
            best = max(filter(None, (best, found)), key=lambda each: each.rate, default=None)
            if len(tree) > 1:
                reason = PlainReason.BELOW_BREAK_EVEN
        return best, reason

    def _rests(self, standing: Standing, worth: float) -> bool:
        """Says whether a drafter is not asked in this round."""
        if standing.resting:
            standing.resting -= 1
            return True
        if worth >= 1:
            standing.rest_slow()
        elif not standing.is_new and standing.gains.hope < 0:
            standing.rest()
        return standing.resting > 0

    def _affordable(self, standing: Standing, limits: Budget) -> int:
        """Returns how many draft tokens the account pays for, should all of them be wrong."""
        plain_s = self.seconds.plain_s
        left_s = self.account.stake * plain_s
        for draft_tokens in range(limits.num_draft_tokens, 0, -1):
            rows = min(draft_tokens + 1, limits.num_rows)
            if (
                self.seconds.most_lost_s(rows)
                + standing.answer_s(draft_tokens, self.seconds.plain_s)
                <= left_s
            ):
                return draft_tokens
        return 0

    def _is_asked_beside(self, best: _Candidate, standing: Standing) -> bool:
        """Says whether a drafter may have better draft tokens, or shows for little which of these
        are wrong (`reach_beside`)."""
        if standing.rate > best.rate:
            return True
        rows_s = self.costs.at(len(best.plan.tree)) - self.costs.at(1)
        return standing.asked_s < _CHECKED * rows_s

    def _worth(self, draft_token_s: float) -> float:
        """Returns how likely a draft token has to be: what it and its row cost, over the time of a
        token."""
        return (self.costs.slope + draft_token_s) / self.seconds.token_s

    def _judged(
        self, name: str, tree: TokenTree, reach: list[float], limits: Budget
    ) -> _Candidate | None:
        """The best plan with a drafter's tree, where there is one that the account pays for."""
        plan = plan_rows(tree, reach, limits, self.costs, self.seconds.token_s)
        if plan is None:
            return None
        # What all that were asked have taken is spent, whoever drafts.
        spent_s = sum(seconds for seconds, _ in self._asked.values())
        rows = len(plan.tree)
        if self.seconds.most_lost_s(rows) + spent_s > self.account.stake * self.seconds.plain_s:
            return None
        expected = sum(plan.values) or sum(reach_of(self.standings[name].calibration, plan.tree))
        seconds = self.seconds.at(rows) + spent_s
        return _Candidate(name, tree, reach, plan, expected, seconds)

    def _ask(
        self, drafter: Drafter, pending: int, limits: Budget, most: int, worth: float
    ) -> TokenTree:
        """Asks for at most so many draft tokens, and for one where it is not known what that
        takes."""
        standing = self.standings[drafter.name]
        limits = replace(
            limits,
            num_draft_tokens=min(most, limits.num_draft_tokens) if standing.is_measured else 1,
            min_reach=worth,
            free_rows=self.costs.plain_rows,
            shape=self._shape(drafter, limits) if standing.is_measured else (),
        )
        start = self._clock()
        tree = drafter.propose(pending, limits)
        seconds = self._clock() - start
        seconds = max(0.0, seconds) if math.isfinite(seconds) else 0.0
        self._asking_s += seconds
        own_s, caught_up_s = standing.answered(len(tree) - 1, seconds, self.seconds.plain_s)
        self._caught_up_s += caught_up_s
        self._asked[drafter.name] = own_s, tree
        return tree

    def _standing(self, drafter: Drafter) -> Standing:
        if drafter.name not in self.standings:
            draft_token_s = self._draft_token_s.get(drafter.name)
            expected = TextGains(_EXPECTED)
            if draft_token_s is not None and drafter.reported_acceptance:
                gain = self.seconds.best_gain(drafter.reported_acceptance, draft_token_s)
                expected = TextGains(gain, REPORTED)
            self.standings[drafter.name] = Standing(draft_token_s, expected)
        return self.standings[drafter.name]

    def _shape(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Returns the shape of a tree that samples are to fill."""
        acceptance = () if not limits.branches else drafter.sibling_acceptance()
        if not acceptance:
            return ()
        pass_s = self._draft_token_s.get(drafter.name, self.standings[drafter.name].draft_token_s)
        room = (limits.num_rows, limits.num_draft_tokens)
        return self._kept_shape.fitting(acceptance, self.costs, pass_s, *room)
