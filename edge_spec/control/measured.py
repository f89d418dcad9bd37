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
_SHAPE_ROUNDS = 64  # for which the best shape of a sampled tree is kept
_DEEPEST = 8  # levels of it
_MOST_LOST = 16  # plain steps that a drafter may lose before it rests
_REST_PER_LOSS = 50  # rounds of rest for each of them: 2 % of the time
_FIRST_REST, _LONGEST_REST = 32, 65_536  # rounds
_OUTLIER = 4.0  # times the usual duration, beyond which something else was going on

_log = logging.getLogger(__name__)


def sibling_acceptance(drafter: Drafter) -> Sequence[float]:
    return drafter.sibling_acceptance() if isinstance(drafter, Branching) else ()


class Account:
    """What one drafter has lost lately, and whether it rests.

    guess_s: seconds a guess, where that is known. The first round after a rest tells nothing about
    it, nor whether the drafter is of use, since it has a text to catch up with.
    """

    def __init__(self, guess_s: float | None) -> None:
        self._guess_s = guess_s
        self.resting = 0  # rounds left
        self._rest = _FIRST_REST
        self._rounds = 0  # since it was at rest
        self._first_lost_s = self._lost_s = 0.0  # in the first of them, and in the others

    @property
    def measured(self) -> bool:
        return self._guess_s is not None

    @property
    def guess_s(self) -> float:
        """Seconds a guess; 0 before it was measured."""
        return self._guess_s or 0.0

    def drafted(self, guesses: int, seconds: float) -> float:
        """The seconds to charge it with: fewer where the machine was busy with something else."""
        if self._rounds and self._guess_s is not None:
            seconds = min(seconds, _OUTLIER * self._guess_s * max(guesses, 1))
        if self._rounds and guesses:
            now = seconds / guesses
            known = now if self._guess_s is None else self._guess_s
            self._guess_s = _MEMORY * known + (1 - _MEMORY) * now
        return seconds

    def observe(self, seconds: float, tokens: int, plain_s: float) -> None:
        """Sends it to rest once it has lost too much since it last broke even (Page 1954,
        Continuous Inspection Schemes: the cumulative sum). plain_s: seconds of a plain round."""
        lost_s = self._lost_s + seconds - tokens * plain_s
        self._rounds += 1
        if self._rounds == 1:
            self._first_lost_s = max(0.0, lost_s)
        elif lost_s > 0:
            self._lost_s = lost_s
            if lost_s > _MOST_LOST * plain_s:
                self.rest(plain_s)
        else:
            self._rest = _FIRST_REST
            self._first_lost_s = self._lost_s = 0.0

    def rest(self, plain_s: float) -> None:
        """Twice as long each time, or as long as it takes to win back what was lost, since a text
        may change; then it is tried again, and measured anew. For good, more or less, where it was
        too slow before it was asked: even to try it, it would have to read the whole text."""
        lost_rounds = (self._first_lost_s + self._lost_s) / plain_s
        rounds = max(self._rest, round(_REST_PER_LOSS * lost_rounds))
        self.resting = min(rounds, _LONGEST_REST) if self._rounds else _LONGEST_REST
        self._rest *= 2
        self._rounds, self._guess_s = 0, None
        self._first_lost_s = self._lost_s = 0.0


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
        self._asked: dict[str, float] = {}  # seconds of those that were asked in this round
        self._chosen: str | None = None
        self._seconds = costs.at(1)
        self._tokens = 1.0
        self._best: tuple[int, ...] = ()
        self._shape_age = 0
        self._shape_room = (0, 0)  # rows and levels that it was made for
        self._around_s = 0.0  # of a round, outside drafting and the pass

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> Plan:
        self._asked, self._chosen = {}, None
        limits = limited(budget, self.max_draft_tokens, self.branches, self.probes)
        if not drafters:
            return Plan(TokenTree.chain(pending), PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return Plan(TokenTree.chain(pending), PlainReason.BUDGET)
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            account = self._account(drafter)
            if account.resting:
                account.resting -= 1
                reason = PlainReason.COOLDOWN
                continue
            worth = self._worth(account.guess_s)
            if worth >= 1:
                _log.info("%s rests: a guess costs %.2f of a token's time", drafter.name, worth)
                account.rest(self._plain_s)
                reason = PlainReason.BELOW_BREAK_EVEN
                continue
            tree = self._ask(drafter, pending, limits, worth)
            plan = cut(tree, limits, min_reach=self._worth(0.0))
            if plan is not None:
                self._chosen = drafter.name
                return plan
            if len(tree) > 1:
                reason = PlainReason.BELOW_BREAK_EVEN
        return Plan(TokenTree.chain(pending), reason)

    def wants(self, drafter: Drafter) -> bool:
        account = self._account(drafter)
        return not account.resting and self._worth(account.guess_s) < 1

    def observe(self, round_stats: RoundStats) -> None:
        self.costs.observe(round_stats.num_rows, round_stats.forward_s)
        self._seconds = _MEMORY * self._seconds + round_stats.total_s
        self._tokens = _MEMORY * self._tokens + round_stats.num_tokens
        # What drafters learn afterwards is left out: it costs the same in every round.
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        most_s = _OUTLIER * (self.costs.at(round_stats.num_rows) + self._around_s)
        pass_s = min(round_stats.forward_s + around_s, most_s)
        self._around_s = _MEMORY * self._around_s + (1 - _MEMORY) * min(around_s, most_s)
        for name, draft_s in self._asked.items():
            account = self._accounts[name]
            if self._chosen in (None, name):
                account.observe(pass_s + draft_s, round_stats.num_tokens, self._plain_s)
            else:  # it has cost its time, and another one has guessed
                account.observe(self._plain_s + draft_s, 1, self._plain_s)
            if account.resting:
                _log.info("%s rests: its rounds were slower than plain steps", name)

    @property
    def _plain_s(self) -> float:
        """Of a plain round."""
        return self.costs.at(1) + self._around_s

    def _worth(self, guess_s: float) -> float:
        """How likely a guess has to be: what it and its row cost, over the time of a token."""
        token_s = min(self._seconds / self._tokens, self._plain_s)
        return (self.costs.slope + guess_s) / token_s

    def _ask(self, drafter: Drafter, pending: int, limits: Budget, worth: float) -> TokenTree:
        """For one guess where it is not known what that takes."""
        account = self._account(drafter)
        if account.measured:
            limits = replace(limits, min_reach=worth, shape=self._shape(drafter, limits))
        else:
            limits = replace(limits, num_draft_tokens=1, min_reach=worth)
        start = self._clock()
        tree = drafter.propose(pending, limits)
        taken_s = self._clock() - start
        self._asked[drafter.name] = account.drafted(len(tree) - 1, taken_s)
        return tree

    def _account(self, drafter: Drafter) -> Account:
        if drafter.name not in self._accounts:
            self._accounts[drafter.name] = Account(self._guess_s.get(drafter.name))
        return self._accounts[drafter.name]

    def _shape(self, drafter: Drafter, limits: Budget) -> tuple[int, ...]:
        """Of a tree that samples are to fill; a new one now and then, as acceptance is learnt."""
        acceptance = () if not limits.branches else sibling_acceptance(drafter)
        if not acceptance:
            return ()
        room = (limits.num_rows, min(limits.num_draft_tokens, _DEEPEST))
        old = self._shape_age >= _SHAPE_ROUNDS and room == self._shape_room
        if old or room > self._shape_room:  # not at a text's end, where little fits
            pass_s = self._guess_s.get(drafter.name, self._account(drafter).guess_s)
            self._best = best_shape(acceptance, self.costs, pass_s, *room)
            self._shape_age, self._shape_room = 0, room
        self._shape_age += 1
        fits = len(self._best) <= limits.num_rows
        return self._best if fits and len(self._best) > 1 else ()
