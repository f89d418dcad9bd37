"""A policy for drafters that cost something: it compares what they win with what they take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS, Plan, cut, limited
from edge_spec.control.shape import best_shape
from edge_spec.drafters.protocol import Branching, Budget, Drafter
from edge_spec.metrics import PlainReason, RoundStats
from edge_spec.tree import TokenTree

_MEMORY = 0.95  # weight of the rounds before, in means over rounds: about the last 20 count
_TRIAL_ROUNDS = 8  # of a drafter, before it is judged
_SHAPE_ROUNDS = 64  # for which the best shape of a sampled tree is kept
_DEEPEST = 8  # levels of it
_FIRST_REST, _LONGEST_REST = 32, 1024  # rounds

_log = logging.getLogger(__name__)


def sibling_acceptance(drafter: Drafter) -> Sequence[float]:
    return drafter.sibling_acceptance() if isinstance(drafter, Branching) else ()


class Account:
    """What one drafter has won and taken lately, and whether it rests."""

    def __init__(self, guess_s: float | None) -> None:
        self._guess_s = guess_s
        self.resting = 0  # rounds left
        self._rest = _FIRST_REST
        self._rounds = 0
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds a token in its rounds; None before it has had enough of them."""
        return self._seconds / self._tokens if self._rounds >= _TRIAL_ROUNDS else None

    @property
    def guess_s(self) -> float:
        """Seconds a guess; 0 before it was measured."""
        return self._guess_s or 0.0

    def drafted(self, guesses: int, seconds: float) -> None:
        if guesses:
            now = seconds / guesses
            known = now if self._guess_s is None else self._guess_s
            self._guess_s = _MEMORY * known + (1 - _MEMORY) * now

    def observe(self, seconds: float, tokens: int) -> None:
        self._rounds += 1
        self._seconds = _MEMORY * self._seconds + seconds
        self._tokens = _MEMORY * self._tokens + tokens

    def rest(self) -> None:
        """Twice as long each time, since a text may change; then it is tried again."""
        self.resting = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        self._rounds, self._seconds, self._tokens = 0, 0.0, 0.0

    def succeed(self) -> None:
        self._rest = _FIRST_REST


class MeasuredPolicy:
    """Asks drafters in their order, each for guesses that are likely enough to win back what they
    cost at the rate of the last rounds; a drafter whose rounds are slower than plain ones rests.

    costs: of the target's rows. guess_s: seconds a guess of drafters, where that is known.
    """

    def __init__(
        self,
        costs: RowCosts,
        guess_s: dict[str, float],
        max_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        branches: bool = True,
        probes: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs
        self.max_draft_tokens = max_draft_tokens
        self.branches = branches
        self.probes = probes
        self._clock = clock
        self._guess_s = guess_s
        self._accounts: dict[str, Account] = {}
        self._asked: list[str] = []
        self._seconds = costs.at(1)
        self._tokens = 1.0
        self._best: tuple[int, ...] = ()
        self._shape_age = 0
        self._around_s = 0.0  # of a round, outside drafting and the pass

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> Plan:
        self._asked = []
        limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
        if not drafters:
            return Plan(TokenTree.chain(pending), PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return Plan(TokenTree.chain(pending), PlainReason.BUDGET)
        reason = PlainReason.NO_CANDIDATE
        row_s, token_s = self.costs.slope, self._seconds / self._tokens
        for drafter in drafters:
            account = self._account(drafter)
            if account.resting:
                account.resting -= 1
                reason = PlainReason.COOLDOWN
                continue
            worth = (row_s + account.guess_s) / token_s
            if worth >= 1:
                self._send_to_rest(drafter, account, worth)
                reason = PlainReason.BELOW_BREAK_EVEN
                continue
            limits = replace(limits, min_reach=worth, shape=self._shape(drafter, limits))
            start = self._clock()
            tree = drafter.propose(pending, limits)
            account.drafted(len(tree) - 1, self._clock() - start)
            self._asked.append(drafter.name)
            plan = cut(tree, limits, min_reach=row_s / token_s)
            if plan is not None:
                self._asked = [drafter.name]
                return plan
            if len(tree) > 1:
                reason = PlainReason.BELOW_BREAK_EVEN
        return Plan(TokenTree.chain(pending), reason)

    def wants(self, drafter: Drafter) -> bool:
        return not self._account(drafter).resting

    def observe(self, round_stats: RoundStats) -> None:
        self.costs.observe(round_stats.num_rows, round_stats.forward_s)
        self._seconds = _MEMORY * self._seconds + round_stats.total_s
        self._tokens = _MEMORY * self._tokens + round_stats.num_tokens
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        self._around_s = _MEMORY * self._around_s + (1 - _MEMORY) * around_s
        plain_s = self.costs.at(1) + self._around_s
        for name in self._asked:
            account = self._accounts[name]
            account.observe(round_stats.total_s, round_stats.num_tokens)
            token_s = account.token_s
            if token_s is None:
                continue
            if token_s > plain_s:
                _log.info("%s rests: %.2f times the time of plain steps", name, token_s / plain_s)
                account.rest()
            else:
                account.succeed()

    def _account(self, drafter: Drafter) -> Account:
        if drafter.name not in self._accounts:
            self._accounts[drafter.name] = Account(self._guess_s.get(drafter.name))
        return self._accounts[drafter.name]

    def _shape(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Of a tree that samples are to fill; a new one now and then, as acceptance is learnt."""
        acceptance = () if not limits.branches else sibling_acceptance(drafter)
        if not acceptance:
            return ()
        if self._shape_age % _SHAPE_ROUNDS == 0:
            pass_s = self._guess_s.get(drafter.name, 0.0)
            depth = min(limits.num_draft_tokens, _DEEPEST)
            self._best = best_shape(acceptance, self.costs, pass_s, limits.num_rows, depth)
        self._shape_age += 1
        fits = len(self._best) <= limits.num_rows
        return self._best if fits and len(self._best) > 1 else ()

    def _send_to_rest(self, drafter: Drafter, account: Account, worth: float) -> None:
        _log.info(
            "%s rests: a guess and its row cost %.2f of the time of a token", drafter.name, worth
        )
        account.rest()
