"""A drafter that has lost too much lately rests."""

from __future__ import annotations

import math
from typing import NamedTuple

from edge_spec.control.text_gains import TextGains
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries

_MEMORY = 0.95  # weight of the rounds before, in means over rounds: about the last 20 count
_FIRST_REST, _LONGEST_REST = 32, 65_536  # rounds
# A drafter that loses a step in every round, say by rows that it needs for itself, rests 40 rounds
# for each: 2.5 % of the time. One that loses as much in ten may as well be unlucky.
_REST_PER_PACE, _LONGEST_REST_PER_LOSS = 40.0, 50.0


class Patience(NamedTuple):
    """The losses that one drafter may have."""

    most_lost: float  # plain steps, before it rests
    rest_per_loss: float  # rounds of rest for each of them


# One that has nothing to catch up with loses only by wrong draft tokens, of which it makes fewer as
# it learns: a long rest would cost more than it saves.
WITH_FREE = Patience(8, 5)
WITH_COSTLY = Patience(16, 50)  # 2 % of the time
# Plain steps that one whose use nobody has shown may lose at first: twice as many each time that it
# has broken even, and all that it has won.
UNPROVEN_LOSS, UNPROVEN_HEAD_LOSS = 2.0, 1.0
# Plain steps that trying one takes, reading the text with it included.
_LOST_IN_TRIAL = 4.0


class Backoff:
    """Counts what one drafter has lost lately, and sends it to rest for that.

    draft_token_s: seconds a draft token, where that is known. first_loss: plain steps that it may
    lose before it has shown that it is of use; None: as many as later. The first round after a rest
    tells nothing about either, since the drafter has a text to catch up with.
    """

    def __init__(
        self,
        draft_token_s: float | None,
        patience: Patience = WITH_COSTLY,
        first_loss: float | None = None,
    ) -> None:
        self._draft_token_s = draft_token_s
        self._patience = patience
        self._most_lost = patience.most_lost if first_loss is None else first_loss
        self.is_proven = first_loss is None  # it is of use, or was once
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST)  # in rounds
        self._rounds = 0  # since it was at rest
        self._first_lost_s = self._lost_s = 0.0  # in the first of them, and in the others
        self._seconds = self._tokens = 0.0  # means over its rounds
        self.asked_s = 0.0  # mean over the rounds in which it was asked; 0 before the second
        self.texts = TextGains()
        self._rests_in_text = False  # until the text ends

    @property
    def resting(self) -> int:
        """Rounds left of its rest."""
        return self._rests.resting

    def count(self) -> None:
        """Counts a round of its rest."""
        self._rests.count()

    @property
    def measured(self) -> bool:
        return self._draft_token_s is not None

    def trust(self) -> None:
        """It is expected to be of use: it may lose as much as later."""
        self._most_lost = self._patience.most_lost
        self.is_proven = True

    def doubt(self) -> None:
        """It is known not to have been of use: it begins at rest, as long as it would have to after
        a trial. Then it may have become so."""
        self._rests.resting = round(self._patience.rest_per_loss * _LOST_IN_TRIAL)

    def begin_text(self) -> None:
        """A rest that only the text before has earned is over."""
        self.texts.begin_text()
        if self._rests_in_text:
            self._rests_in_text = False
            self._rests.resting = 0
            self._rests.reset()

    @property
    def rate(self) -> float:
        """Tokens a second of its rounds. Before the first it may be better than any other."""
        return self._tokens / self._seconds if self._seconds else math.inf

    @property
    def draft_token_s(self) -> float:
        """Seconds a draft token; 0 before it was measured."""
        return self._draft_token_s or 0.0

    def drafted(self, draft_tokens: int, seconds: float) -> float:
        """The seconds to charge it with: fewer where the machine was busy with something else."""
        if self._rounds and self._draft_token_s is not None:
            seconds = without_outlier(seconds, self._draft_token_s * max(draft_tokens, 1))
        if self._rounds and draft_tokens:
            now = seconds / draft_tokens
            known = now if self._draft_token_s is None else self._draft_token_s
            self._draft_token_s = _MEMORY * known + (1 - _MEMORY) * now
        if self._rounds:
            known = self.asked_s or seconds
            self.asked_s = _MEMORY * known + (1 - _MEMORY) * seconds
        return seconds

    def observe(self, seconds: float, tokens: int, plain_s: float) -> None:
        """Counts a round of its draft tokens. plain_s: seconds of a plain round."""
        self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * seconds
        self._tokens = _MEMORY * self._tokens + (1 - _MEMORY) * tokens
        self._add(seconds - tokens * plain_s, plain_s)

    def unused(self, seconds: float, plain_s: float) -> None:
        """Counts a round in which it took this time to draft, and another one's tokens were worth
        more. That says nothing of what its own rounds bring."""
        self._add(seconds, plain_s)

    def _add(self, lost_s: float, plain_s: float) -> None:
        """Sends it to rest once it has lost too much since it last broke even (Page 1954,
        Continuous Inspection Schemes: the cumulative sum)."""
        self.texts.observe(-lost_s / plain_s)
        lost_s += self._lost_s
        self._rounds += 1
        if self._rounds == 1:
            self._first_lost_s = max(0.0, lost_s)
        elif lost_s > 0:
            self._lost_s = lost_s
            if lost_s > self._most_lost * plain_s:
                self.rest(plain_s)
        else:
            self.is_proven = True
            self._rests.reset()
            won = max(self._most_lost, -lost_s / plain_s)
            self._most_lost = min(self._most_lost + won, self._patience.most_lost)
            self._first_lost_s = self._lost_s = 0.0
        if self.texts.is_losing and not self.resting:
            self._rest_in_text()

    def _rest_in_text(self) -> None:
        """Sends it to rest until this text ends, or for a while, since a long text may change."""
        self._rests_in_text = True
        self._rests.rest()
        self.texts.begin_trial()

    def rest(self, plain_s: float) -> None:
        """Sends it to rest twice as long each time, or as long as it takes to win back what was
        lost; then it is tried and measured again, since a text may change. One that was too slow
        before it was asked has the longest rest: even to be tried, it would have to read the whole
        text."""
        lost_rounds = (self._first_lost_s + self._lost_s) / plain_s
        pace = lost_rounds / max(self._rounds, 1)
        per_loss = max(
            self._patience.rest_per_loss, min(_LONGEST_REST_PER_LOSS, _REST_PER_PACE * pace)
        )
        self._rests.rest(round(per_loss * lost_rounds) if self._rounds else _LONGEST_REST)
        self._rests_in_text = False
        self._rounds, self._draft_token_s = 0, None
        self._first_lost_s = self._lost_s = 0.0
