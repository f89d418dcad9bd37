"""What the policy knows about one drafter: its cost, its acceptance, and what it may still lose.

Besides a drafter's lifetime confidence (`LearntAcceptance`), draft tokens of the current text are
counted by depth and confidence, with a memory of a few dozen: the mean of a Beta distribution whose
prior is the confidence.
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

_CONFIDENCES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)  # lower bounds of all buckets but the first
_DEPTHS = (1, 2, 4, 8)  # lower bounds
_PRIOR_WEIGHT = 24.0  # in draft tokens
_TELLING = 8.0  # draft tokens before acceptance is reported
_TOKEN_MEMORY = 1 - 1 / 48  # weight of a bucket's earlier draft tokens

_COLUMNS = len(_CONFIDENCES) + 1
_NUM_BUCKETS = len(_DEPTHS) * _COLUMNS


class Calibration:
    """Corrects a drafter's claimed P(draft token is right | its parent is right)."""

    def __init__(self) -> None:
        self._seen = [0.0] * _NUM_BUCKETS
        self._right = [0.0] * _NUM_BUCKETS
        self._claimed = [0.0] * _NUM_BUCKETS  # sum of the confidences

    def estimate(self, depth: int, confidence: float) -> float:
        """Return the corrected confidence in [0, 1]; 0 and 1 stay. depth: 1 for the first draft
        token."""
        bucket = _bucket(depth, confidence)
        if not self._seen[bucket]:
            return confidence
        # The confidence still ranks draft tokens within a bucket.
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
        """Return the share of recent draft tokens that were right; None while too few are known."""
        seen = sum(self._seen)
        return sum(self._right) / seen if seen >= _TELLING else None

    def counts(self) -> np.ndarray:
        """Return [3, buckets] float64: draft tokens, right ones and sums of confidence, faded by
        age."""
        return np.array([self._seen, self._right, self._claimed])


def reach_of(calibration: Calibration, tree: TokenTree) -> list[float]:
    """Return for each row the chance that it and all its ancestors are right."""
    if tree.draft_probs:  # sampled rows are accepted by the draft's probabilities alone
        reach: list[float] = tree.reach.tolist()
        return reach
    chances, estimate = [1.0], calibration.estimate
    confidence: list[float] = tree.confidence.tolist()
    if tree.is_chain:  # the common case
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


FIRST = 1.5  # plain steps, at the start of a text
NAMED = 3.0  # likewise, for the first text with a drafter that the user named
INCOME = 0.02  # likewise, per round, for a drafter that won lately
PUT_BY = 0.01  # likewise, at most, per round not asked, to pay for catching up
LEAST = 0.75  # likewise, at the start of a text, for a drafter that won lately
_MOST = 8.0  # likewise, upper limit
_STAKE = 0.8  # share of the balance that one round may risk
_LATELY = 64  # rounds without a gain after which income has fallen by a third


class RegretAccount:
    """One drafter's gains and losses against plain decoding, in plain steps.

    A drafter is asked only if the account covers the worst case, so R rounds take at most FIRST +
    (INCOME + PUT_BY) * R plain steps longer than plain decoding (docs/proofs.md). A drafter without
    gains is tried ever more rarely: its loss grows as sqrt(R), the worst case of bandits (Auer et
    al. 2002, The Nonstochastic Multiarmed Bandit Problem).
    """

    def __init__(self, balance: float = FIRST) -> None:
        self.balance = balance
        self._is_new = True
        self._rounds = 0  # since its last gain

    def begin_text(self) -> None:
        """Reset the balance: no losing what earlier texts gained, but a recent winner gets another
        try."""
        self.balance = self._first

    def settle(self, gain: float) -> None:
        """Count a round. gain: plain steps saved; negative where drafting was slower."""
        self._rounds += 1
        self._is_new = False
        self.balance = min(_MOST, max(0.0, self.balance + gain) + self._income)
        if gain > 0 and self.balance > FIRST:
            self._rounds = 0

    def rest(self, rounds: int, unread: float) -> None:
        """Count rounds without the drafter. unread: plain steps to catch up on each, for which to
        save."""
        for _ in range(rounds):
            self.settle(0.0)
        self.balance = min(_MOST, self.balance + rounds * min(unread, PUT_BY))

    def rounds_to(self, stake: float) -> int:
        """Return after how many rounds without being asked it may risk this many plain steps."""
        missing = stake / _STAKE - self.balance
        return ceil(missing / self._income) if missing > 0 else 0

    @property
    def _income(self) -> float:
        return INCOME / sqrt(1 + self._rounds / _LATELY)

    @property
    def stake(self) -> float:
        """Return the plain steps that one round may risk."""
        return _STAKE * self.balance

    @property
    def first_stake(self) -> float:
        """Return the plain steps that the first round of the next text may risk."""
        return _STAKE * self._first

    @property
    def _first(self) -> float:
        least = LEAST * self._income / INCOME
        return self.balance if self._is_new else min(max(self.balance, least), FIRST)


_MOST_WATCHING = 0.25  # plain steps, limit for the first observation
_SLOW_ROUNDS = 1024  # after which a slow drafter is timed again


class DrafterRecord:
    """One drafter's costs and results, in plain steps, which outlast changes of pace.

    draft_token: steps of a draft token; None: not measured; 0: looked up, with nothing to catch up
    on. balance: the account's first balance. is_slow: draft tokens cost more than they gain.
    """

    def __init__(self, draft_token: float | None, balance: float = FIRST) -> None:
        self.calibration = Calibration()
        self.account = RegretAccount(balance)
        self.attends = True  # observes this round
        self.is_slow, self._slow_rounds = False, 0
        self.is_free = draft_token == 0
        self._token = draft_token
        self._fixed = 0.0  # steps of an answer without draft tokens
        self._watching = 0.0  # mean steps to observe a round
        self._asked = 0.0  # mean steps of an answer; 0 before the first
        self._answers = 0
        self._unread = 0  # tokens to read before it can draft, at least
        self._reading = 0.0 if self.is_free else None  # steps of each
        self._reads_prompt = True
        self._steps = self._tokens = 0.0  # means over its rounds

    def begin_text(self, num_prompt: int) -> None:
        """Begin a text after a prompt of `num_prompt` tokens, which it has read or still has to."""
        self.account.begin_text()
        self._unread = 0 if self._reads_prompt else self._unread + num_prompt

    def decide_reading(self, pays: bool) -> bool:
        self._reads_prompt = pays
        return pays

    @property
    def is_measured(self) -> bool:
        return self._token is not None

    @property
    def draft_token(self) -> float:
        return self._token or 0.0

    @property
    def rate(self) -> float:
        """Return the tokens per step of its rounds; infinite before the first, so that it gets a
        try."""
        return self._tokens / self._steps if self._steps else math.inf

    @property
    def unread(self) -> float:
        """Return the expected steps to catch up before it can draft."""
        return self._reading_each * self._unread

    @property
    def _reading_each(self) -> float:
        # Otherwise its debt could grow faster than its savings, and it would never be tried again.
        return PUT_BY if self._reading is None else self._reading

    def answer(self, draft_tokens: int) -> float:
        """Return the expected steps of an answer and of observing the round."""
        return self._fixed + self._watching + draft_tokens * self.draft_token

    def miss(self, rounds: int) -> None:
        """Count rounds in which it neither drafts nor observes."""
        self.attends = False
        self._unread += rounds
        self.account.rest(rounds, self._reading_each)
        # It may have been timed on a busy machine.
        self._slow_rounds += rounds if self.is_slow else 0
        if self._slow_rounds >= _SLOW_ROUNDS:
            self._token, self._answers, self._slow_rounds = None, 0, 0

    def wait(self) -> None:
        """Count a round in which it only observes another drafter's tokens."""
        self.attends = True
        self._unread += 1

    def answered(self, draft_tokens: int, steps: float) -> float:
        """Count an answer; return the steps to charge, less where the machine was busy
        otherwise."""
        unread, reading, self._unread = self._unread, self.unread, 0
        usual = self._fixed + self.draft_token * max(draft_tokens, 1)
        self._answers += 1
        if unread and not self.is_free:
            read = without_outlier(max(0.0, steps - usual), max(reading, 1.0)) / unread
            self._reading = read if self._reading is None else 0.5 * (self._reading + read)
            return min(steps, usual + read * unread)
        if self._answers == 1:  # it has read its files or waited for another process
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
        """Count the time to observe a round. The first is capped: another process may have delayed
        it."""
        before = self._watching or min(steps, _MOST_WATCHING)
        self._watching = faded(before, steps)

    def drafted(self, steps: float, tokens: int) -> None:
        """Count a round that verified its draft tokens."""
        self._steps = faded(self._steps, steps)
        self._tokens = faded(self._tokens, tokens)
