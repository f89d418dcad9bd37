"""What is known of one drafter: what its draft tokens take, how often they are right, what they
bring."""

from __future__ import annotations

import math

from edge_spec.control.calibration import Calibration
from edge_spec.control.gains import TextGains
from edge_spec.core.outliers import without_outlier

_ANSWERS = 2  # of a new one: the first may have a text to catch up with
_FIRST_REST, _SLOW_REST = 16, 1024  # rounds
# Plain steps that reading a token is taken for before it was seen, and all tokens at most: a
# drafter that could not be paid for any more would never be tried again.
_READING, _MOST_UNSEEN = 0.05, 2.0
_MEMORY = 0.95  # weight of the rounds before, in means over rounds: about the last 20 count


class Standing:
    """One drafter as the policy sees it.

    draft_token_s: seconds a draft token; None: not known yet. gains: what is expected of it before
    any was seen.
    """

    def __init__(self, draft_token_s: float | None, gains: TextGains) -> None:
        self.calibration = Calibration()
        self.gains = gains
        self.resting = 0  # rounds left of its rest
        self.attends = True  # it observes this round
        self.asked_s = 0.0  # mean seconds of an answer; 0 before the first
        self.watching_s = 0.0  # mean seconds that it takes to observe a round
        self._token_s = self._known_token_s = draft_token_s
        self._fixed_s = 0.0  # of an answer without a draft token
        self._asked = 0  # times
        self.missed_rounds = 0  # since it was asked
        # For each of them; None: not known yet.
        self._catch_up_s = None if draft_token_s != 0 else 0.0
        self._seconds = self._tokens = 0.0  # means over rounds that drafted with it

    def begin_text(self) -> None:
        self.calibration.begin_text()
        self.gains.begin_text()
        self.resting = self.missed_rounds = 0  # it reads the prompt before the first round

    @property
    def is_measured(self) -> bool:
        return self._token_s is not None

    @property
    def is_new(self) -> bool:
        """Says whether its answers still have to tell what a draft token takes."""
        return self._token_s is None and 0 < self._asked <= _ANSWERS

    def rest(self) -> None:
        """Begins a rest until there is hope again. The first one is short: what it takes to catch
        up is known after it."""
        rounds = self.gains.rounds_to_hope
        self.resting = min(rounds, _FIRST_REST) if self._catch_up_s is None else rounds

    def rest_slow(self) -> None:
        """Begins the rest of one whose draft tokens cost more than they can bring. What they cost
        is then measured again, where it was measured here: the machine may have been busy."""
        self.resting = _SLOW_REST
        if self._known_token_s is None:
            self._token_s, self._asked = None, 0

    @property
    def draft_token_s(self) -> float:
        """Seconds a draft token; 0 before it was measured."""
        return self._token_s or 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of its rounds. Before the first it may be better than any other."""
        return self._tokens / self._seconds if self._seconds else math.inf

    def miss(self) -> None:
        """Counts a round in which it is not asked."""
        self.missed_rounds += 1
        self.gains.fade()

    def answer_s(self, draft_tokens: int, plain_s: float) -> float:
        """Returns the seconds to expect of an answer, what it has to catch up with before and its
        observing the round included. plain_s: of a plain step."""
        if self._catch_up_s is None:
            catch_up_s = min(_READING * self.missed_rounds, _MOST_UNSEEN) * plain_s
        else:
            catch_up_s = self._catch_up_s * self.missed_rounds
        return catch_up_s + self._fixed_s + self.watching_s + draft_tokens * self.draft_token_s

    def answered(self, draft_tokens: int, seconds: float, plain_s: float) -> tuple[float, float]:
        """Counts an answer; returns its seconds, fewer where the machine was busy with something
        else, and those that it has caught up in before. plain_s: of a plain step."""
        if not self._asked and self._known_token_s == 0:  # it has read its files, or has waited
            seconds = min(seconds, plain_s)
        missed, self.missed_rounds = self.missed_rounds, 0
        if missed:
            usual_s = self._fixed_s + draft_tokens * self.draft_token_s
            caught_up_s = max(0.0, seconds - usual_s) / missed
            before_s = caught_up_s if self._catch_up_s is None else self._catch_up_s
            self._catch_up_s = max(caught_up_s, _faded(before_s, caught_up_s))
            return min(seconds, usual_s), max(0.0, seconds - usual_s)
        if self._asked:
            usual_s = self.draft_token_s * max(draft_tokens, 1)
            seconds = without_outlier(seconds, max(self.asked_s, usual_s))
            if draft_tokens:
                now_s = max(0.0, seconds - self._fixed_s) / draft_tokens
                self._token_s = now_s if self._token_s is None else _faded(self._token_s, now_s)
        if not draft_tokens:
            self._fixed_s = _faded(self._fixed_s, seconds) if self._fixed_s else seconds
        self.asked_s = _faded(self.asked_s, seconds) if self._asked else seconds
        self._asked += 1
        return seconds, 0.0

    def observed(self, seconds: float) -> None:
        """Counts the time that it took to observe a round."""
        self.watching_s = _faded(self.watching_s, seconds) if self.watching_s else seconds

    def drafted(self, seconds: float, tokens: int) -> None:
        """Counts a round whose draft tokens were its own."""
        self._seconds = _faded(self._seconds, seconds)
        self._tokens = _faded(self._tokens, tokens)


def _faded(mean: float, value: float) -> float:
    return _MEMORY * mean + (1 - _MEMORY) * value
