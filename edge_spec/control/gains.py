"""What asking a drafter brings, by text: the mean of a new text is expected where texts have it,
and each round moves it."""

from __future__ import annotations

from edge_spec.control.estimates import Level

_WITHIN = 0.5  # plain steps: deviation of rounds in a text, at first
# Likewise of texts: of a drafter that nothing is known of, and of one of which there are reports.
UNKNOWN, REPORTED = 0.5, 0.15
_ROW_NOISE = 0.15  # variance that each draft token of a round brings at least
_PRIOR_ROUNDS = 8.0  # that the former counts for
_LEAST_BETWEEN = 0.045
_MEMORY = 1 - 1 / 24  # weight of the texts before, with every further one
_HOPE = 0.7  # deviations above the mean
_TURN = 600  # rounds in which a text may become another
_LONGEST_REST = 256  # rounds


class TextGains:
    """The gains of rounds in which one drafter was asked, in plain steps.

    Rounds of a text scatter around its mean, and the means of texts around that of all of them; how
    much each scatters is learnt, so that texts that are alike are judged by all of them, and others
    by their own first rounds (Efron and Morris 1975). While a drafter is not asked, what is known
    of the text fades, until hope is back.
    """

    def __init__(self, expected: float, between: float = UNKNOWN) -> None:
        """expected, between: the mean of texts and their deviation, before any was seen."""
        # Counts of texts, sums of their means, of those squared and of 1 / rounds, of squares about
        # the means, and of rounds less one. What is expected counts as one text, for ever: where a
        # drafter was not asked for many texts, it is what is known of it.
        within = _PRIOR_ROUNDS * _WITHIN**2
        self._expected = (1.0, expected, expected**2 + between**2, 0.0, within, _PRIOR_ROUNDS)
        self._sums: tuple[float, ...] = self._expected
        self._rounds, self._sum, self._sum_squares = 0, 0.0, 0.0  # of this text
        self._of_text = Level(expected, between**2)

    def begin_text(self) -> None:
        seen = (0.0,) * len(self._sums)
        if count := self._rounds:
            mean = self._sum / count
            scatter = max(0.0, self._sum_squares - count * mean**2)
            seen = (1.0, mean, mean**2, 1 / count, scatter, count - 1.0)
        self._sums = tuple(
            _MEMORY * before + (1 - _MEMORY) * expected + now
            for before, expected, now in zip(self._sums, self._expected, seen, strict=True)
        )
        self._rounds, self._sum, self._sum_squares = 0, 0.0, 0.0
        texts, means, *_ = self._sums
        self._of_text = Level(means / texts, self._between * (1 + 1 / texts))

    def observe(self, gain: float, rows: int = 1) -> None:
        """Counts a round of so many rows."""
        self._rounds += 1
        self._sum += gain
        self._sum_squares += gain**2
        # Draft tokens of one round are right or wrong together: many tell little more than one.
        self._of_text.observe(gain, max(self._noise, _ROW_NOISE * (rows - 1)))

    def fade(self) -> None:
        """Counts a round in which it was not asked."""
        self._of_text.drift(self._between / _TURN)

    @property
    def hope(self) -> float:
        """Returns the gain that a round may well have: a little above the mean."""
        return self._of_text.mean + _HOPE * self._of_text.deviation

    @property
    def rounds_to_hope(self) -> int:
        """Returns after how many rounds without it there is hope again."""
        missing = (self._of_text.mean / _HOPE) ** 2 - self._of_text.variance
        return min(max(1, int(missing * _TURN / self._between)), _LONGEST_REST)

    @property
    def _noise(self) -> float:
        *_, within, degrees = self._sums
        return max(_LEAST_BETWEEN**2, within / degrees)

    @property
    def _between(self) -> float:
        """The variance of the means of texts, without what the scatter within them adds to it."""
        texts, means, squares, inverse_rounds, *_ = self._sums
        scattered = squares / texts - (means / texts) ** 2
        return max(_LEAST_BETWEEN**2, scattered - self._noise * inverse_rounds / texts)
