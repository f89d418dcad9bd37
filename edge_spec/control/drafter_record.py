"""What the policy knows of one drafter: what an answer of it takes, how often it is right, and what
it may still lose."""

from __future__ import annotations

import math
from math import ceil, sqrt

from edge_spec.control.calibration import Calibration
from edge_spec.core.outliers import OUTLIER, without_outlier

FIRST = 1.5  # plain steps, at the beginning of a text
INCOME = 0.02  # likewise, a round, of one that has won lately
PUT_BY = 0.01  # likewise, at most, for reading what is written while it is not asked
_LEAST = 0.75  # likewise, at the beginning of a text, of one that has won lately
_MOST = 8.0  # likewise, ever
_STAKE = 0.8  # of what is left, so that one round does not end drafting
_LATELY = 64  # rounds without a gain, after which income has fallen by a third


class RegretAccount:
    """Counts in plain steps what the rounds of one drafter have won over plain decoding and what
    they may still lose.

    It may be asked only where the account pays for the worst that may come of it. So with it a text
    of R rounds takes at most FIRST + (INCOME + PUT_BY) * R plain steps longer than plain decoding
    would (docs/policy.md). One that does not win is tried the more seldom the longer that lasts: in
    R rounds it loses in the order of the root of R, as bandits do in the worst case (Auer et al.
    2002, The Nonstochastic Multiarmed Bandit Problem).
    """

    def __init__(self, balance: float = FIRST) -> None:
        self.balance = balance
        self._rounds = 0  # since it won

    def begin_text(self) -> None:
        """A text begins, which is to lose no more than any other: what was won in the texts before
        it is theirs. Where it has won lately it may try again."""
        self.balance = min(max(self.balance, _LEAST * self._income / INCOME), FIRST)

    def settle(self, gain: float) -> None:
        """Counts a round. gain: the plain steps that it has saved, negative where it was slower."""
        self._rounds += 1
        self.balance = min(_MOST, max(0.0, self.balance + gain) + self._income)
        if gain > 0 and self.balance > FIRST:
            self._rounds = 0

    def rest(self, rounds: int, unread: float) -> None:
        """Counts rounds in which it was not asked. unread: the plain steps that it will take to
        read what was written in one, for which something is put by."""
        for _ in range(rounds):
            self.settle(0.0)
        self.balance = min(_MOST, self.balance + rounds * min(unread, PUT_BY))

    def rounds_to(self, stake: float) -> int:
        """Returns after how many rounds, in which it is not asked, a round may lose so much."""
        missing = stake / _STAKE - self.balance
        return ceil(missing / self._income) if missing > 0 else 0

    @property
    def _income(self) -> float:
        return INCOME / sqrt(1 + self._rounds / _LATELY)

    @property
    def stake(self) -> float:
        """Returns the plain steps that one round may lose."""
        return _STAKE * self.balance


# Plain steps that reading a token is taken for before it was seen, and all tokens at most: a
# drafter that could not be paid for any more would never be tried again.
_READING, _MOST_UNSEEN = 0.05, 2.0
_MOST_WATCHING = 0.25  # likewise, that the first round takes to observe
_MEMORY = 0.95  # weight of the rounds before, in means over rounds: about the last 20 count
_SLOW_ROUNDS = 1024  # after which one that was too slow is timed again


class DrafterRecord:
    """One drafter as the policy sees it.

    draft_token_s: seconds a draft token; None: not known yet, 0: it is looked up, and has nothing
    to read before. pays: whether it is expected to, by what is reported of it. is_slow: its draft
    tokens cost more than they bring.
    """

    def __init__(self, draft_token_s: float | None, pays: bool = True) -> None:
        self.calibration = Calibration()
        self.account = RegretAccount(FIRST if pays else 0.0)
        self.attends = True  # it observes this round
        self.asked_s = 0.0  # mean seconds of an answer; 0 before the first
        self._token_s = draft_token_s
        self._is_given, self.is_free = draft_token_s is not None, draft_token_s == 0
        self._fixed_s = 0.0  # of an answer without a draft token
        self._watching_s = 0.0  # mean seconds that it takes to observe a round
        self._answers = 0
        self.is_slow, self._slow_rounds = False, 0
        self._unread = 0  # tokens that it has to read before it can draft, at least
        self._reading_s = 0.0 if self.is_free else None  # of one of them; None: not known yet
        self._reads_prompt = True
        self._seconds = self._tokens = 0.0  # means over rounds that drafted with it

    def begin_text(self, num_prompt: int) -> None:
        """Begins a text after a prompt of so many tokens, which it has read or still has to."""
        self.account.begin_text()
        self._unread = 0 if self._reads_prompt else self._unread + num_prompt

    def reads_prompt(self, pays: bool) -> bool:
        """Decides whether it reads the prompt before the text begins."""
        self._reads_prompt = pays
        return pays

    @property
    def is_measured(self) -> bool:
        return self._token_s is not None

    @property
    def draft_token_s(self) -> float:
        """Returns the seconds of a draft token; 0 before it was measured."""
        return self._token_s or 0.0

    @property
    def rate(self) -> float:
        """Returns the tokens a second of its rounds. Before the first it may be better than any
        other."""
        return self._tokens / self._seconds if self._seconds else math.inf

    def unread_s(self, plain_s: float) -> float:
        """Returns the seconds to expect of what it has to read before it can draft. plain_s: of a
        plain step."""
        if self._reading_s is None:
            return min(_READING * self._unread, _MOST_UNSEEN) * plain_s
        return self._reading_s * self._unread

    def answer_s(self, draft_tokens: int) -> float:
        """Returns the seconds to expect of an answer and of observing the round."""
        return self._fixed_s + self._watching_s + draft_tokens * self.draft_token_s

    def miss(self, rounds: int, plain_s: float) -> None:
        """Counts rounds in which it is neither asked nor shown the outcome. plain_s: of a plain
        step."""
        self.attends = False
        self._unread += rounds
        self.account.rest(rounds, (self._reading_s or 0.0) / plain_s)
        if not self.is_slow:
            return
        # What its draft tokens cost is timed again after a while, where it was timed here: the
        # machine may have been busy.
        self._slow_rounds += rounds
        if self._slow_rounds >= _SLOW_ROUNDS and not self._is_given:
            self._token_s, self._answers, self._slow_rounds = None, 0, 0

    def wait(self) -> None:
        """Counts a round in which it observes what another one has drafted."""
        self.attends = True
        self._unread += 1

    def answered(self, draft_tokens: int, seconds: float, plain_s: float) -> tuple[float, float]:
        """Counts an answer; returns its seconds, fewer where the machine was busy with something
        else, and those of reading before. plain_s: of a plain step."""
        self.attends = True
        usual_s = self.draft_token_s * max(draft_tokens, 1)
        unread, self._unread = self._unread, 0
        if unread and not self.is_free:
            self._answers += 1
            without_reading_s = self._fixed_s + draft_tokens * self.draft_token_s
            read_s = max(0.0, seconds - without_reading_s)
            before_s = read_s / unread if self._reading_s is None else self._reading_s
            self._reading_s = max(read_s / unread, _faded(before_s, read_s / unread))
            return min(seconds, without_reading_s), read_s
        spent_s = seconds
        if not self._answers:  # it has read its files, or has waited for another process
            seconds = min(seconds, max(plain_s, OUTLIER * usual_s))
            spent_s = seconds if self.is_free else spent_s
        else:
            seconds = spent_s = without_outlier(seconds, max(self.asked_s, usual_s))
            if draft_tokens:
                now_s = max(0.0, seconds - self._fixed_s) / draft_tokens
                self._token_s = now_s if self._token_s is None else _faded(self._token_s, now_s)
        self._answers += 1
        if not draft_tokens:
            self._fixed_s = _faded(self._fixed_s or seconds, seconds)
        self.asked_s = _faded(self.asked_s or seconds, seconds)
        return spent_s, 0.0

    def watched(self, seconds: float, plain_s: float) -> None:
        """Counts the time that it took to observe a round. The first of them may have waited for
        another process, which is not to keep it from being asked again."""
        before_s = self._watching_s or min(seconds, _MOST_WATCHING * plain_s)
        self._watching_s = _faded(before_s, seconds)

    def drafted(self, seconds: float, tokens: int) -> None:
        """Counts a round whose draft tokens were its own."""
        self._seconds = _faded(self._seconds, seconds)
        self._tokens = _faded(self._tokens, tokens)


def _faded(mean: float, value: float) -> float:
    return _MEMORY * mean + (1 - _MEMORY) * value
