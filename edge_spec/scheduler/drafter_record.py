"""What the policy knows of one drafter: what an answer of it takes, how often it is right, and what
it may still lose.

A drafter's confidence is learnt over its whole life (`LearntAcceptance`). A text has its own
ways: what was right nine times in ten may be wrong for a page. So draft tokens are counted once
more, by drafter, depth and confidence, with a memory of a few dozen of them: the mean of a Beta
distribution whose prior is the drafter's own word.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, sqrt

import numpy as np

from edge_spec.core.outliers import OUTLIER, without_outlier
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.cost import faded

_CONFIDENCES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)  # the least of each bucket but the first
_DEPTHS = (1, 2, 4, 8)  # likewise
_PRIOR_WEIGHT = 24.0  # draft tokens that the drafter's word counts for
_TELLING = 8.0  # draft tokens, before their share is told
_TOKEN_MEMORY = 1 - 1 / 48  # weight of those before, with every further one of its bucket

_COLUMNS = len(_CONFIDENCES) + 1
_NUM_BUCKETS = len(_DEPTHS) * _COLUMNS


class Calibration:
    """Corrects what one drafter says of P(a draft token is right | its parent is)."""

    def __init__(self) -> None:
        self._seen = [0.0] * _NUM_BUCKETS
        self._right = [0.0] * _NUM_BUCKETS
        self._claimed = [0.0] * _NUM_BUCKETS  # sum of the confidences

    def estimate(self, depth: int, confidence: float) -> float:
        """depth: 1 for the first draft token. Between 0 and 1, and 0 or 1 where the confidence
        is."""
        bucket = _bucket(depth, confidence)
        if not self._seen[bucket]:
            return confidence
        # Within a bucket the drafter's word still tells one draft token from another.
        surprise = self._right[bucket] - self._claimed[bucket]
        moved = confidence + surprise / (_PRIOR_WEIGHT + self._seen[bucket])
        return min(max(moved, 0.02 * confidence), 1 - 0.02 * (1 - confidence))

    def observe(self, depth: int, confidence: float, right: bool) -> None:
        bucket = _bucket(depth, confidence)
        self._seen[bucket] = _TOKEN_MEMORY * self._seen[bucket] + 1
        self._right[bucket] = _TOKEN_MEMORY * self._right[bucket] + right
        self._claimed[bucket] = _TOKEN_MEMORY * self._claimed[bucket] + confidence

    @property
    def share_right(self) -> float | None:
        """Return the share of the last draft tokens that were right; None before enough were
        decided to tell."""
        seen = sum(self._seen)
        return sum(self._right) / seen if seen >= _TELLING else None

    def counts(self) -> np.ndarray:
        """[3, buckets] float64: draft tokens, those that were right, and the sum of their
        confidences, each weighted by age."""
        return np.array([self._seen, self._right, self._claimed])


def reach_of(calibration: Calibration, tree: TokenTree) -> list[float]:
    """Return for each row the chance that it and all rows above it are right."""
    if tree.draft_probs:  # the verdict on a sampled row depends on its drafter's word alone
        reach: list[float] = tree.reach.tolist()
        return reach
    chances, estimate = [1.0], calibration.estimate
    confidence: list[float] = tree.confidence.tolist()
    if tree.is_chain:  # most rounds
        chance = 1.0
        for row in range(1, len(confidence)):
            chance *= estimate(row, confidence[row])
            chances.append(chance)
        return chances
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    for row in range(1, len(confidence)):
        chances.append(chances[parents[row]] * estimate(depths[row], confidence[row]))
    return chances


def learn(calibration: Calibration, tree: TokenTree, text: Sequence[int]) -> None:
    """Count the draft tokens that the text after the pending token decides."""
    if tree.draft_probs:
        return
    confidence: list[float] = tree.confidence.tolist()
    for row, right in tree.followed(text):
        depth = row if tree.is_chain else int(tree.depths[row])
        calibration.observe(depth, confidence[row], right)


def _bucket(depth: int, confidence: float) -> int:
    row = bisect_right(_DEPTHS, depth) - 1
    return row * _COLUMNS + bisect_right(_CONFIDENCES, confidence)


FIRST = 1.5  # plain steps, at the beginning of a text
NAMED = 3.0  # likewise, at the beginning of the first one, of one that the user has named
INCOME = 0.02  # likewise, a round, of one that has won lately
PUT_BY = 0.01  # likewise, at most, for reading what is written while it is not asked
LEAST = 0.75  # likewise, at the beginning of a text, of one that has won lately
_MOST = 8.0  # likewise, ever
_STAKE = 0.8  # of what is left, so that one round does not end drafting
_LATELY = 64  # rounds without a gain, after which income has fallen by a third


class RegretAccount:
    """Counts in plain steps what the rounds of one drafter have won over plain decoding and what
    they may still lose.

    It may be asked only where the account pays for the worst that may come of it. So with it a text
    of R rounds takes at most FIRST + (INCOME + PUT_BY) * R plain steps longer than plain decoding
    would (docs/proofs.md). One that does not win is tried the more seldom the longer that lasts: in
    R rounds it loses in the order of the root of R, as bandits do in the worst case (Auer et al.
    2002, The Nonstochastic Multiarmed Bandit Problem).
    """

    def __init__(self, balance: float = FIRST) -> None:
        self.balance = balance
        self._is_new = True  # nothing was counted
        self._rounds = 0  # since it won

    def begin_text(self) -> None:
        """A text begins, which is to lose no more than any other: what was won in the texts before
        it is theirs. Where it has won lately it may try again."""
        self.balance = self._first

    def settle(self, gain: float) -> None:
        """Count a round. gain: the plain steps that it has saved, negative where it was slower."""
        self._rounds += 1
        self._is_new = False
        self.balance = min(_MOST, max(0.0, self.balance + gain) + self._income)
        if gain > 0 and self.balance > FIRST:
            self._rounds = 0

    def rest(self, rounds: int, unread: float) -> None:
        """Count rounds in which it was not asked. unread: the plain steps that it will take to
        read what was written in one, for which something is put by."""
        for _ in range(rounds):
            self.settle(0.0)
        self.balance = min(_MOST, self.balance + rounds * min(unread, PUT_BY))

    def rounds_to(self, stake: float) -> int:
        """Return after how many rounds, in which it is not asked, a round may lose so much."""
        missing = stake / _STAKE - self.balance
        return ceil(missing / self._income) if missing > 0 else 0

    @property
    def _income(self) -> float:
        return INCOME / sqrt(1 + self._rounds / _LATELY)

    @property
    def stake(self) -> float:
        """Return the plain steps that one round may lose."""
        return _STAKE * self.balance

    @property
    def first_stake(self) -> float:
        """Return the plain steps that the first round of the next text may lose."""
        return _STAKE * self._first

    @property
    def _first(self) -> float:
        least = LEAST * self._income / INCOME
        return self.balance if self._is_new else min(max(self.balance, least), FIRST)


_MOST_WATCHING = 0.25  # plain steps, at most, that the first round takes to observe
_SLOW_ROUNDS = 1024  # after which one that was too slow is timed again


class DrafterRecord:
    """One drafter as the policy sees it. All its times are in plain steps of the moment: so they
    hold on while the machine becomes slower or faster.

    draft_token: steps that one takes; None: not known yet, 0: it is looked up, and has nothing to
    read before. balance: of its account at first. is_slow: its draft tokens cost more than they
    bring.
    """

    def __init__(self, draft_token: float | None, balance: float = FIRST) -> None:
        self.calibration = Calibration()
        self.account = RegretAccount(balance)
        self.attends = True  # it observes this round
        self.is_slow, self._slow_rounds = False, 0
        self.is_free = draft_token == 0
        self._token = draft_token
        self._fixed = 0.0  # of an answer without a draft token
        self._watching = 0.0  # mean that it takes to observe a round
        self._asked = 0.0  # mean of an answer; 0 before the first
        self._answers = 0
        self._unread = 0  # tokens that it has to read before it can draft, at least
        self._reading = 0.0 if self.is_free else None  # of one of them; None: not known yet
        self._reads_prompt = True
        self._steps = self._tokens = 0.0  # means over rounds that drafted with it

    def begin_text(self, num_prompt: int) -> None:
        """Begin a text after a prompt of so many tokens, which it has read or still has to."""
        self.account.begin_text()
        self._unread = 0 if self._reads_prompt else self._unread + num_prompt

    def decide_reading(self, pays: bool) -> bool:
        """Decide whether it reads the prompt before the text begins."""
        self._reads_prompt = pays
        return pays

    @property
    def is_measured(self) -> bool:
        return self._token is not None

    @property
    def draft_token(self) -> float:
        """Return the steps of a draft token; 0 before it was measured."""
        return self._token or 0.0

    @property
    def rate(self) -> float:
        """Return the tokens a step of its rounds. Before the first it may be better than any
        other."""
        return self._tokens / self._steps if self._steps else math.inf

    @property
    def unread(self) -> float:
        """Return the steps to expect of what it has to read before it can draft."""
        return self._reading_each * self._unread

    @property
    def _reading_each(self) -> float:
        # Before it was seen it is taken for what is put by: a drafter whose reading grows faster
        # than its account would never be tried again.
        return PUT_BY if self._reading is None else self._reading

    def answer(self, draft_tokens: int) -> float:
        """Return the steps to expect of an answer and of observing the round."""
        return self._fixed + self._watching + draft_tokens * self.draft_token

    def miss(self, rounds: int) -> None:
        """Count rounds in which it is neither asked nor shown the outcome."""
        self.attends = False
        self._unread += rounds
        self.account.rest(rounds, self._reading_each)
        # The machine may have been busy when its draft tokens were timed.
        self._slow_rounds += rounds if self.is_slow else 0
        if self._slow_rounds >= _SLOW_ROUNDS:
            self._token, self._answers, self._slow_rounds = None, 0, 0

    def wait(self) -> None:
        """Count a round in which it observes what another one has drafted."""
        self.attends = True
        self._unread += 1

    def answered(self, draft_tokens: int, steps: float) -> float:
        """Count an answer; return the steps to charge: fewer where the machine was busy with
        something else."""
        unread, reading, self._unread = self._unread, self.unread, 0
        usual = self._fixed + self.draft_token * max(draft_tokens, 1)
        self._answers += 1
        if unread and not self.is_free:
            read = without_outlier(max(0.0, steps - usual), max(reading, 1.0)) / unread
            self._reading = read if self._reading is None else 0.5 * (self._reading + read)
            return min(steps, usual + read * unread)
        if self._answers == 1:  # it has read its files, or has waited for another process
            steps = min(steps, max(1.0, OUTLIER * usual))
        else:
            steps = without_outlier(steps, max(self._asked, usual))
            if draft_tokens:
                now = max(0.0, steps - self._fixed) / draft_tokens
                self._token = now if self._token is None else faded(self._token, now)
        if not draft_tokens:
            self._fixed = faded(self._fixed or steps, steps)
        self._asked = faded(self._asked or steps, steps)
        return steps

    def watched(self, steps: float) -> None:
        """Count the time that it took to observe a round. The first of them may have waited for
        another process, which is not to keep it from being asked again."""
        before = self._watching or min(steps, _MOST_WATCHING)
        self._watching = faded(before, steps)

    def drafted(self, steps: float, tokens: int) -> None:
        """Count a round whose draft tokens were its own."""
        self._steps = faded(self._steps, steps)
        self._tokens = faded(self._tokens, tokens)
