"""The gain of drafting in one text, judged by how much the texts before have differed in theirs."""

from __future__ import annotations

_MEMORY = 1 - 1 / 24  # weight of the texts before, with every further one
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
        self._texts = _MEMORY * self._texts + 1
        self._means = _MEMORY * self._means + mean
        self._squares = _MEMORY * self._squares + mean**2
        self._inverse_rounds = _MEMORY * self._inverse_rounds + 1 / count
        self._within = _MEMORY * self._within + self._gain_squares - count * mean**2
        self._degrees = _MEMORY * self._degrees + count - 1
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
