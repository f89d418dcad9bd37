"""The default policy asks and verifies in every round what wins most, by what was measured.

A round that commits n tokens in s seconds is worth n - rate * s, in tokens: rate is that of the
last rounds, since time could have been spent on those. To choose what is worth most in each round
maximizes tokens a second over all of them (Dinkelbach 1967, On nonlinear fractional programming),
where the best ratio round by round would not. Seconds come from t(k), measured and corrected by
every pass (RowCosts), tokens from what drafters say of their draft tokens, corrected by what came
of them (Calibration). Plain decoding is always among the choices. Whether a drafter is asked at all
is a matter of its account, which pays for the worst that the round could bring (RegretAccount).

In a cascade each level of drafters drafts for the draft above it, as that one does for the target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Forward, Model
from edge_spec.core.modes import DEFAULT_DRAFT_TOKENS
from edge_spec.core.outliers import without_outlier
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import Stage
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.scheduler.cost import RoundSeconds, RowCosts
from edge_spec.scheduler.drafter_record import DrafterRecord, learn, reach_beside, reach_of
from edge_spec.scheduler.policy import KeptShape, Policy, RoundPlan, limited, plan_rows

# Of what the rows of a plan cost: another drafter that takes less is asked what it says of them.
_CHECKED = 0.2
# How likely the next draft token of a model is, at most, to be right: a pass after a row finds one,
# and has to pay for that one. 0.75 and 1 were worse in most cases (benchmarks/results/trees.json).
_NEXT_RIGHT = 0.85
_LONGEST_SLEEP = 32  # rounds: what passes take may change meanwhile


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
        self.records: dict[str, DrafterRecord] = {}  # by drafter
        self._clock = clock
        self._draft_token_s = {**dict.fromkeys(free, 0.0), **draft_token_s}
        # In this round, of those that were asked: seconds without and of reading, draft tokens.
        self._asked: dict[str, tuple[float, float, TokenTree]] = {}
        self._asking_s = 0.0  # all that asking has taken in this round
        self._asleep = self._slept = 0  # rounds without a look at drafters: left, and past
        self._own_s = 0.0  # that the policy took to learn from the round before
        self._limited = Budget(0, 1), Budget(0, 1)  # of the last round: given, and as limited
        self._present: dict[str, DrafterRecord] = {}  # of those that could be asked in this round
        self._resting: frozenset[str] = frozenset()  # those of them that were not
        self._chosen: str | None = None
        self._kept_shape = KeptShape()

    @property
    def costs(self) -> RowCosts:
        """Returns those of rows in the last round's kind of pass."""
        return self.seconds.costs

    def begin(self, num_prompt: int = 0) -> None:
        self._wake()
        self._asleep = 0
        for record in self.records.values():
            record.begin_text(num_prompt)

    def wants(self, drafter: Drafter) -> bool:
        record = self._record(drafter)
        pays = self._worth(record) < 1 and self._affordable(record, Budget(1, 2), has_read=True) > 0
        return record.reads_prompt(pays)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        self._forget_round()
        if budget != self._limited[0]:
            limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
            self._limited = budget, limits
        limits = self._limited[1]
        plain = TokenTree.chain(pending)
        if not drafters:
            return RoundPlan(plain, PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return RoundPlan(plain, PlainReason.BUDGET)
        if not self.costs.is_scaled:  # what a step takes, the first ones tell
            return RoundPlan(plain, PlainReason.BASELINE)
        if self._asleep:
            return RoundPlan(plain, PlainReason.COOLDOWN, resting=self._resting)
        self._wake()
        self._present = {drafter.name: self._record(drafter) for drafter in drafters}
        best, reason = self._best(drafters, pending, limits)
        if best is not None and not self._is_known_to_pay(best):
            best, reason = None, PlainReason.BASELINE
        self._chosen = best.name if best is not None else None
        plan = best.plan if best is not None else RoundPlan(plain, reason)
        resting = [name for name, record in self._present.items() if not record.attends]
        if not resting:
            return plan
        self._resting = frozenset(resting)
        if len(resting) == len(self._present):
            self._asleep = self._rounds_to_wake()
        return plan._replace(resting=self._resting)

    def observe(self, round_stats: RoundStats) -> None:
        if self._asleep and self.seconds.is_usual(round_stats):
            self._asleep -= 1
            self._slept += 1
            return
        self._asleep = 0
        start = self._clock()
        times = (round_stats.forward_s, round_stats.draft_s, round_stats.total_s)
        if math.isfinite(sum(times)):  # else of a clock that is broken
            asked_s = sum(own_s + read_s for own_s, read_s, _ in self._asked.values())
            self.seconds.observe(round_stats, asked_s)
            self._settle(round_stats)
        self._forget_round()  # the next one may be plain without asking this policy
        self._own_s = max(0.0, self._clock() - start)

    def beliefs(self) -> str:
        row = self.costs.slope / self.costs.at(1)
        told = [f"a row costs {row:.2f} of a step"]
        for name, record in self.records.items():
            if found := record.calibration.of_late:
                told.append(f"{name} is right {found[0]:.2f} ± {found[1]:.2f} of the time")
            told.append(f"{name} may lose {record.account.balance:.1f} steps")
        return ", ".join(told)

    def _best(
        self, drafters: Sequence[Drafter], pending: int, limits: Budget
    ) -> tuple[_Candidate | None, PlainReason]:
        """Asks drafters, and returns the best of what they propose, or why there is nothing."""
        best: _Candidate | None = None
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            record = self._present[drafter.name]
            worth = self._worth(record)
            record.is_slow = worth >= 1
            most = 0 if record.is_slow else self._affordable(record, limits)
            if not most:
                reason = PlainReason.BELOW_BREAK_EVEN if record.is_slow else PlainReason.COOLDOWN
                record.miss(1, self.seconds.plain_s)
                continue
            if best is not None and not self._is_asked_beside(best, record):
                record.wait()
                continue
            tree = self._ask(drafter, pending, limits, most, worth)
            if len(tree) == 1 and best is None:
                continue
            reach = reach_of(record.calibration, tree)
            found = self._judged(drafter.name, tree, reach, limits)
            if found is not None and found.plan.tree.draft_probs:
                # Samples are not dropped for what they are, so not held against another plan.
                return found, reason
            if best is not None:
                beside = reach_beside(best.tree, best.reach, tree, reach)
                best = self._judged(best.name, best.tree, beside, limits)
            best = max(filter(None, (best, found)), key=lambda each: each.rate, default=None)
            reason = PlainReason.BELOW_BREAK_EVEN
        return best, reason

    def _ask(
        self, drafter: Drafter, pending: int, limits: Budget, most: int, worth: float
    ) -> TokenTree:
        """Asks for at most so many draft tokens, and for one where it is not known what that
        takes."""
        record = self.records[drafter.name]
        asked = Budget(
            most if record.is_measured else 1,
            limits.num_rows,
            limits.branches,
            limits.probes,
            min_reach=worth if record.is_free else min(1.0, worth / _NEXT_RIGHT),
            least_reach=self.seconds.row_s / self.seconds.token_s,
            free_rows=self.costs.plain_rows,
            shape=self._shape(drafter, limits) if record.is_measured else (),
        )
        start = self._clock()
        tree = drafter.propose(pending, asked)
        taken_s = self._clock() - start
        taken_s = max(0.0, taken_s) if math.isfinite(taken_s) else 0.0
        self._asking_s += taken_s
        passes = drafter.passes if len(tree) > 1 else 0
        passes = int(tree.depths.max()) if passes is None else passes
        own_s, read_s = record.answered(passes, taken_s, self.seconds.plain_s)
        self._asked[drafter.name] = own_s, read_s, tree
        return tree

    def _judged(
        self, name: str, tree: TokenTree, reach: list[float], limits: Budget
    ) -> _Candidate | None:
        """The best plan with a drafter's tree, where there is one that its account pays for."""
        record = self.records[name]
        # What all that were asked have taken is spent, whoever drafts.
        spent_s = sum(own_s for own_s, *_ in self._asked.values())
        stake_s = record.account.stake * self.seconds.plain_s - spent_s
        most = self.seconds.rows_within(stake_s, min(len(tree), limits.num_rows))
        limits = replace(limits, num_rows=most)
        plan = plan_rows(tree, reach, limits, self.costs, self.seconds.token_s)
        if plan is None:
            return None
        rows = len(plan.tree)
        expected = sum(plan.values) or sum(reach_of(record.calibration, plan.tree))
        return _Candidate(name, tree, reach, plan, expected, self.seconds.at(rows) + spent_s)

    def _is_known_to_pay(self, best: _Candidate) -> bool:
        """Says whether it gains more than what is not known of a plain step's time."""
        seconds = self.seconds
        more_s = seconds.at(len(best.plan.tree)) - seconds.plain_s  # what was asked is spent
        gain = best.tokens - 1 - more_s / seconds.token_s
        return gain * seconds.plain_s >= (best.tokens - 1) * self.costs.plain_deviation_s

    def _is_asked_beside(self, best: _Candidate, record: DrafterRecord) -> bool:
        """Says whether a drafter may have better draft tokens, or shows for little which of these
        are wrong (`reach_beside`)."""
        if record.rate > best.rate:
            return True
        rows_s = self.costs.at(len(best.plan.tree)) - self.costs.at(1)
        return record.asked_s < _CHECKED * rows_s

    def _worth(self, record: DrafterRecord) -> float:
        """Returns how likely a draft token has to be: what it and its row cost, over the time of a
        token."""
        return (self.seconds.row_s + record.draft_token_s) / self.seconds.token_s

    def _affordable(self, record: DrafterRecord, limits: Budget, has_read: bool = False) -> int:
        """Returns how many passes of a draft the account pays for, each with a row of the target's,
        should all draft tokens be wrong."""
        plain_s, most = self.seconds.plain_s, limits.num_draft_tokens
        left_s = record.account.stake * plain_s - record.answer_s(0)
        if not has_read:
            left_s -= record.unread_s(plain_s)

        def pays(count: int) -> bool:
            rows_s = self.seconds.most_lost_s(min(count + 1, limits.num_rows))
            return rows_s + count * record.draft_token_s <= left_s

        if pays(most):  # in most rounds all of them or none
            return most
        return next(filter(pays, range(most - 1, 0, -1))) if pays(1) else 0

    def _settle(self, round_stats: RoundStats) -> None:
        """Charges each drafter with what it has taken, and pays it for what it has brought."""
        plain_s = self.seconds.plain_s
        # A machine that slows down slows plain steps down as well, which shows later: rows are
        # charged as they cost on average now, and no drafter is to answer for the time between.
        rows_s = self.seconds.at(round_stats.num_rows)
        attending = sum(record.attends for record in self._present.values())
        # What is not an answer: choosing, observing, and learning from the round before.
        rest_s = max(0.0, round_stats.draft_s - self._asking_s + self._own_s)
        share_s = without_outlier(rest_s, rows_s) / max(1, attending)
        for name, record in self._present.items():
            if not record.attends:
                continue
            spent_s, tokens = share_s, 0
            if name in self._asked:
                own_s, read_s, tree = self._asked[name]
                spent_s += own_s + read_s
                if len(tree) > 1:
                    learn(record.calibration, tree, round_stats.tokens)
                if self._chosen in (None, name):  # else another one has drafted
                    spent_s += rows_s
                    tokens = round_stats.num_tokens
                    record.drafted(spent_s, tokens)
            record.watched(share_s, plain_s)
            record.account.settle(tokens - spent_s / plain_s)

    def _wake(self) -> None:
        """Counts the rounds that were slept through."""
        if self._slept:
            self.seconds.rest(self._slept)
            for record in self._present.values():
                record.miss(self._slept, self.seconds.plain_s)
            self._slept = 0

    def _rounds_to_wake(self) -> int:
        """Returns for how many rounds no account will pay for an answer."""
        plain_s = self.seconds.plain_s
        rows_s = self.seconds.most_lost_s(2)
        rounds = [
            record.account.rounds_to(
                (record.unread_s(plain_s) + record.answer_s(1) + rows_s) / plain_s
            )
            for record in self._present.values()
            if not record.is_slow
        ]
        return min([*rounds, _LONGEST_SLEEP])

    def _forget_round(self) -> None:
        self._asked.clear()
        self._asking_s = 0.0
        self._chosen = None

    def _record(self, drafter: Drafter) -> DrafterRecord:
        if drafter.name not in self.records:
            draft_token_s = self._draft_token_s.get(drafter.name)
            reported, pays = drafter.reported_acceptance, True
            if draft_token_s is not None and reported:
                pays = self.seconds.best_gain(reported, draft_token_s) > 0
            self.records[drafter.name] = DrafterRecord(draft_token_s, pays)
        return self.records[drafter.name]

    def _shape(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Returns the shape of a tree that samples are to fill."""
        acceptance = () if not limits.branches else drafter.sibling_acceptance()
        if not acceptance:
            return ()
        pass_s = self._draft_token_s.get(drafter.name, self.records[drafter.name].draft_token_s)
        room = (limits.num_rows, limits.num_draft_tokens)
        return self._kept_shape.fitting(acceptance, self.costs, pass_s, *room)


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
