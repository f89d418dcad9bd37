"""A drafter that has lost too much lately rests; a plain step is due when its time may have
changed."""

from __future__ import annotations

import math
from typing import NamedTuple

from edge_spec.core.metrics import RoundStats
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries

_MEMORY = 0.95  # weight of the rounds before, in means over rounds: about the last 20 count
_FIRST_REST, _LONGEST_REST = 32, 65_536  # rounds
# A drafter that loses a step in every round, say by rows that it needs for itself, rests 40 rounds
# for each: 2.5 % of the time. One that loses as much in ten may as well be unlucky.
_REST_PER_PACE, _LONGEST_REST_PER_LOSS = 40.0, 50.0
_SHORTEST, _LONGEST = 64, 1024  # rounds without a plain one
_SURPRISE = 0.1  # of the expected time, beyond which the next one is due sooner
_TEXT_MEMORY = 1 - 1 / 24  # weight of the texts before, with every further one
FEWEST_TEXTS = 4.0  # before anything is said of how much they differ
# Rounds that the texts before count for in a new one: the fewest, since two rejected rounds may
# always be bad luck, and the most, since no number of alike texts says that the next one is.
_LEAST_WEIGHT, _MOST_WEIGHT = 1.5, 40.0
_NO_LIMIT = 1_000_000  # draft tokens


class TextGains:
    """The gains of one drafter's rounds, in plain steps, by text.

    Rounds of a text scatter around its mean, and the means of texts around that of all of them. So
    the mean of a new text is expected where its own rounds and w rounds of the mean of all texts
    have theirs, w being the variance within texts over that between them (the normal model's
    empirical Bayes estimate; Efron and Morris 1975). Where texts are alike, w is large, and a text
    is judged by all of them; where they differ, by its first few rounds.
    """

    def __init__(self) -> None:
        # Sums over the texts before, each of which counts less the older it is.
        self._texts = self._means = self._squares = self._inverse_rounds = 0.0
        self._within = self._degrees = 0.0  # squares about the means of texts, and rounds less one
        self._rounds = 0  # of this text
        self._gain = self._gain_squares = 0.0
        self._given_up = 0.0  # the gain of its rounds before those that it is judged by

    def observe(self, gain: float) -> None:
        """Counts a round. gain: the plain steps that it has saved."""
        self._rounds += 1
        self._gain += gain
        self._gain_squares += gain**2

    def begin_text(self) -> None:
        """Counts the text before as one of many."""
        count = self._rounds
        if not count:
            return
        mean = self._gain / count
        self._texts = _TEXT_MEMORY * self._texts + 1
        self._means = _TEXT_MEMORY * self._means + mean
        self._squares = _TEXT_MEMORY * self._squares + mean**2
        self._inverse_rounds = _TEXT_MEMORY * self._inverse_rounds + 1 / count
        self._within = _TEXT_MEMORY * self._within + self._gain_squares - count * mean**2
        self._degrees = _TEXT_MEMORY * self._degrees + count - 1
        self._rounds, self._gain, self._gain_squares = 0, 0.0, 0.0
        self._given_up = 0.0

    def begin_trial(self) -> None:
        """Judges the text by its next rounds alone, as if it began there."""
        self._given_up = self._gain

    @property
    def is_known(self) -> bool:
        return self._texts >= FEWEST_TEXTS and self._degrees > 0

    @property
    def usual(self) -> float:
        """The mean of texts: what a round of a new one is expected to gain."""
        return self._means / self._texts

    @property
    def weight(self) -> float:
        """Rounds of this text that those before it count for."""
        within = self._within / self._degrees
        scattered = self._squares / self._texts - self.usual**2
        between = scattered - within * self._inverse_rounds / self._texts
        if between * _MOST_WEIGHT <= within:
            return _MOST_WEIGHT
        return max(within / between, _LEAST_WEIGHT)

    @property
    def is_losing(self) -> bool:
        """Says whether a further round of this text is expected to lose."""
        return self.is_known and self.usual > 0 and self._stake < 0

    def draft_tokens(self, worth: float) -> int:
        """Returns how many a round may have, each of which has to win `worth` plain steps (0: it
        costs nothing, by measurements in which noise is larger than the cost of a row): as many as
        the texts before count for, and more with what this one has gained, but none that could lose
        more than this text may."""
        if worth <= 0 or not self.is_known or self.usual <= 0:
            return _NO_LIMIT
        gain = self._gain - self._given_up
        return int(min(self.weight + gain / worth, self._stake / worth, _NO_LIMIT))

    @property
    def _stake(self) -> float:
        """Plain steps that this text may lose before no gain is expected of it."""
        return self.weight * self.usual + self._gain - self._given_up


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


class Baseline:
    """A session that speculates in every round would never notice that its plain steps have become
    faster, say with another process's end. So one is due after many rounds without any: the rarer,
    the better known."""

    def __init__(self, plain_rows: int = 1) -> None:
        """plain_rows: of a pass that takes no longer than a plain step."""
        self._plain_rows = plain_rows
        self._rests = SpacedRetries(_SHORTEST, _LONGEST)  # in rounds, of which none is plain
        self._rests.begin()

    @property
    def is_due(self) -> bool:
        return not self._rests.resting

    def observe(self, round_stats: RoundStats, expected_s: float) -> None:
        """expected_s: of a plain step's pass, before this round was known."""
        if round_stats.num_rows > self._plain_rows:
            self._rests.count()
            return
        if self.is_due:
            known = abs(round_stats.forward_s - expected_s) < _SURPRISE * expected_s
            (self._rests.lengthen if known else self._rests.reset)()
        self._rests.begin()
