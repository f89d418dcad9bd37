"""The default policy: in every round, propose and verify what gains most by measurement.

A round that commits n tokens in s seconds is worth n - rate * s tokens, at the rate of recent
rounds. Maximizing this per round maximizes tokens per second overall, unlike the ratio of each
round (Dinkelbach 1967, On nonlinear fractional programming). Seconds come from t(k) (RowCosts),
tokens from corrected confidences (Calibration). Plain decoding is always a choice, and a drafter is
asked only if its account covers the worst case (RegretAccount). In a cascade, each level drafts for
the draft model above it in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Forward, Model
from edge_spec.core.modes import DEFAULT_DRAFT_TOKENS
from edge_spec.core.outliers import without_outlier
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import Stage, StageDrafter
from edge_spec.drafters.protocol import GREEDY, Budget, Drafter
from edge_spec.scheduler.cost import RoundCosts, RowCosts
from edge_spec.scheduler.drafter_record import FIRST, LEAST, NAMED, DrafterRecord, learn, reach_of
from edge_spec.scheduler.policy import Policy, RoundPlan, best_shape, limited, plan_rows
from edge_spec.scheduler.priors import expect_acceptance

# Assumed chance, at most, of the token that a draft model's next pass finds, which must pay for
# that pass. 0.75 and 1 were worse in most cases (benchmarks/results/trees.json).
_NEXT_RIGHT = 0.85
_LONGEST_SLEEP = 32  # rounds; pass times may change meanwhile
_SHAPE_ROUNDS, _DEEPEST = 64, 8  # rounds for which a sampled tree's shape is kept; its levels


class _Candidate(NamedTuple):
    name: str
    plan: RoundPlan
    tokens: float
    steps: float

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


class _Answer(NamedTuple):
    tree: TokenTree
    passes: int
    seconds: float


class AdaptivePolicy:
    """Ask drafters in order until one has draft tokens worth verifying, then those with a better
    record.

    costs: of the target's rows. draft_token_s: seconds per draft token, if known. free: drafters
    with nothing to catch up on. named: drafters that the user asked for, which may lose more at
    first. Deterministic for given rounds and times.
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
        named: Collection[str] = (),
    ) -> None:
        self.rounds = RoundCosts(costs)
        self.max_draft_tokens = max_draft_tokens
        self.branches = branches
        self.probes = probes
        self.records: dict[str, DrafterRecord] = {}  # by drafter
        self._clock = clock
        self._named = frozenset(named)
        self._draft_token_s = {**dict.fromkeys(free, 0.0), **draft_token_s}
        self._answers: dict[str, _Answer] = {}  # of this round
        self._asleep = self._slept = 0  # rounds without asking drafters: left, and past
        self._own_s = 0.0  # time the policy took to learn from the last round
        self._present: dict[str, DrafterRecord] = {}  # drafters available this round
        self._resting: frozenset[str] = frozenset()  # those that were not asked
        self._chosen: str | None = None
        self._shape: tuple[int, ...] = ()  # of sampled trees
        self._shape_rounds = 0  # rounds until it is computed again

    @property
    def costs(self) -> RowCosts:
        return self.rounds.costs

    def begin(self, num_prompt: int = 0) -> None:
        self._wake()
        self._asleep = self._shape_rounds = 0
        for record in self.records.values():
            record.begin_text(num_prompt)

    def wants(self, drafter: Drafter) -> bool:
        record = self._record(drafter)
        stake = record.account.first_stake - record.answer(1) - self.rounds.most_lost(2)
        return record.decide_reading(stake >= 0 and self._worth(record) < 1)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        self._forget_round()
        plain = TokenTree.chain(pending)
        if not drafters:
            return RoundPlan(plain, PlainReason.OFF)
        if min(budget.num_draft_tokens, self.max_draft_tokens) <= 0:
            return RoundPlan(plain, PlainReason.BUDGET)
        if not self.costs.is_scaled or self.costs.is_unsure:  # plain steps measure it
            return RoundPlan(plain, PlainReason.BASELINE)
        if self._asleep:
            return RoundPlan(plain, PlainReason.COOLDOWN, resting=self._resting)
        self._wake()
        limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
        self._present = {drafter.name: self._record(drafter) for drafter in drafters}
        best, reason = self._best(drafters, pending, limits)
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
        if self._asleep:
            self._asleep -= 1
            self._slept += 1
            self.rounds.follow(round_stats)
            return
        start = self._clock()
        times = (round_stats.forward_s, round_stats.draft_s, round_stats.total_s)
        if math.isfinite(sum(times)):  # else the clock is broken
            asked_s = sum(answer.seconds for answer in self._answers.values())
            self._settle(round_stats, asked_s, self.rounds.observe(round_stats, asked_s))
        self._forget_round()  # the next round may be plain without asking this policy
        self._own_s = max(0.0, self._clock() - start)

    def beliefs(self) -> str:
        if not self.costs.is_scaled:
            return "not enough to tell"
        told = [f"verifying a draft token costs {self.rounds.row:.0%} of a decoding step"]
        for name, record in self.records.items():
            right = record.calibration.share_right
            found = "not enough to tell" if right is None else f"{right:.0%} right"
            told.append(f"{name}: {found}" + (", resting" if not record.attends else ""))
        return "; ".join(told)

    def _best(
        self, drafters: Sequence[Drafter], pending: int, limits: Budget
    ) -> tuple[_Candidate | None, PlainReason]:
        """Ask drafters; return the best candidate or None, and why there is none."""
        best: _Candidate | None = None
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            record = self._present[drafter.name]
            worth = self._worth(record)
            record.is_slow = worth >= 1
            most = 0 if record.is_slow else self._affordable(record, limits)
            if not most:
                reason = PlainReason.BELOW_BREAK_EVEN if record.is_slow else PlainReason.COOLDOWN
                record.miss(1)
                continue
            if best is not None and record.rate <= best.rate:
                record.wait()
                continue
            tree = self._ask(drafter, pending, limits, most, worth)
            if len(tree) == 1:
                continue
            found = self._judge(drafter.name, tree, limits)
            if found is not None and found.plan.tree.draft_probs:
                # Dropping samples for their values would bias the output.
                return found, reason
            best = max(filter(None, (best, found)), key=lambda each: each.rate, default=None)
            reason = PlainReason.BELOW_BREAK_EVEN
        return best, reason

    def _ask(
        self, drafter: Drafter, pending: int, limits: Budget, most: int, worth: float
    ) -> TokenTree:
        """Ask for at most `most` draft tokens; for one if its cost is unknown."""
        record = self.records[drafter.name]
        asked = Budget(
            most if record.is_measured else 1,
            limits.num_rows,
            limits.branches,
            limits.probes,
            min_reach=worth if record.is_free else min(1.0, worth / _NEXT_RIGHT),
            least_reach=self.rounds.row / self.rounds.token,
            free_rows=self.costs.plain_rows,
            shape=self._shape_of(drafter, limits) if record.is_measured else (),
        )
        start = self._clock()
        tree = drafter.propose(pending, asked)
        taken_s = self._clock() - start
        taken_s = max(0.0, taken_s) if math.isfinite(taken_s) else 0.0
        passes = drafter.passes if len(tree) > 1 else 0
        passes = int(tree.depths.max()) if passes is None else passes
        self._answers[drafter.name] = _Answer(tree, passes, taken_s)
        record.attends = True
        return tree

    def _judge(self, name: str, tree: TokenTree, limits: Budget) -> _Candidate | None:
        """Return the best plan with a drafter's tree, or None if its account covers none."""
        record = self.records[name]
        reach = reach_of(record.calibration, tree)
        # Time spent on all answers is gone, whoever drafts.
        spent = sum(answer.seconds for answer in self._answers.values()) / self.rounds.plain_s
        stake = record.account.stake - spent
        most = self.rounds.rows_within(stake, min(len(tree), limits.num_rows))
        limits = limits._replace(num_rows=most)
        plan = plan_rows(tree, reach, limits, self.rounds)
        if plan is None:
            return None
        expected = sum(plan.values) or sum(reach_of(record.calibration, plan.tree))
        return _Candidate(name, plan, expected, self.rounds.of(len(plan.tree)) + spent)

    def _worth(self, record: DrafterRecord) -> float:
        """Return the break-even chance of a draft token: the cost of it and its row, in tokens."""
        return (self.rounds.row + record.draft_token) / self.rounds.token

    def _affordable(self, record: DrafterRecord, limits: Budget) -> int:
        """Return how many draft passes the account covers if all draft tokens are wrong. Each pass
        adds one row to the target's."""
        most = limits.num_draft_tokens
        left = record.account.stake - record.answer(0) - record.unread

        def pays(count: int) -> bool:
            rows = self.rounds.most_lost(min(count + 1, limits.num_rows))
            return rows + count * record.draft_token <= left

        if pays(most):  # usually all of them or none
            return most
        return next(filter(pays, range(most - 1, 0, -1))) if pays(1) else 0

    def _settle(self, round_stats: RoundStats, asked_s: float, step_s: float) -> None:
        """Charge each drafter for its time and credit its tokens. step_s: of a plain step now."""
        # Charge expected costs: other load is no drafter's fault.
        rows = self.rounds.of(round_stats.num_rows)
        attending = sum(record.attends for record in self._present.values())
        # Time outside answers: choosing, observing, learning from the last round.
        rest = max(0.0, round_stats.draft_s - asked_s + self._own_s) / step_s
        share = without_outlier(rest, rows) / max(1, attending)
        for name, record in self._present.items():
            if not record.attends:
                continue
            spent, tokens = share, 0
            if (answer := self._answers.get(name)) is not None:
                spent += record.answered(answer.passes, answer.seconds / step_s)
                if len(answer.tree) > 1:
                    learn(record.calibration, answer.tree, round_stats.tokens)
                if self._chosen in (None, name):  # else another drafter's tokens were verified
                    spent += rows
                    tokens = round_stats.num_tokens
                    record.drafted(spent, tokens)
            record.watched(share)
            record.account.settle(tokens - spent)

    def _wake(self) -> None:
        if self._slept:
            self.rounds.rest(self._slept)
            for record in self._present.values():
                record.miss(self._slept)
            self._slept = 0

    def _rounds_to_wake(self) -> int:
        rows = self.rounds.most_lost(2)
        rounds = [
            record.account.rounds_to(record.unread + record.answer(1) + rows)
            for record in self._present.values()
            if not record.is_slow
        ]
        return min([*rounds, _LONGEST_SLEEP])

    def _forget_round(self) -> None:
        self._answers.clear()
        self._chosen = None

    def _record(self, drafter: Drafter) -> DrafterRecord:
        if drafter.name not in self.records:
            known_s = self._draft_token_s.get(drafter.name)
            token = None
            if known_s is not None and (self.costs.is_scaled or not known_s):
                token = known_s / self.rounds.plain_s
                # It may have been timed on a busy machine: measure before ruling it out.
                token = None if token and token + self.rounds.row >= 1 else token
            expected = expect_acceptance(drafter.traits, token or 0.0, drafter.reported_acceptance)
            balance = FIRST if self.rounds.best_gain(expected, token or 0.0) > 0 else LEAST
            balance = NAMED if drafter.name in self._named else balance
            self.records[drafter.name] = DrafterRecord(token, balance)
        return self.records[drafter.name]

    def _shape_of(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Return the tree shape for samples to fill; empty if a chain is used."""
        if not (limits.branches and drafter.traits.samples):
            return ()
        acceptance = drafter.sibling_acceptance
        if not acceptance:
            return ()
        if not self._shape_rounds:
            pass_s = self.records[drafter.name].draft_token * self.rounds.plain_s
            room = (limits.num_rows, min(limits.num_draft_tokens, _DEEPEST))
            self._shape = best_shape(acceptance, self.costs, pass_s, *room)
            self._shape_rounds = _SHAPE_ROUNDS
        self._shape_rounds -= 1
        return self._shape if 1 < len(self._shape) <= limits.num_rows else ()


def stage_of(model: Model, costs: RowCosts, drafters: Sequence[StageDrafter]) -> PolicyStage:
    """Return the level that drafts for a draft model with these row costs."""
    policy = AdaptivePolicy(costs, {}, branches=False, probes=False)
    return PolicyStage(drafters, policy, model.capabilities.verified_rows)


class PolicyStage(Stage):
    """A cascade level that applies a policy with its draft model's costs, so useless levels are
    skipped. max_rows: of one pass of the draft model."""

    def __init__(
        self,
        drafters: Sequence[StageDrafter],
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

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._policy.begin(len(prompt))
        super().begin(prompt, sampler)

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
