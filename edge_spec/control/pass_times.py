"""What passes take by their rows, learnt from those that were made: a fixed part, mostly the
weights that are read, and a part for each row. And whether it pays to share them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from edge_spec.core.fading_line import FadingLine
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries

_REMEMBERED = 1 - 1 / 32  # weight of the passes before
_PRIOR_ROWS = 4.0  # of a first pass, half of which is taken for fixed
_FAMILIARITY = 0.5  # passes that this counts for
_LASTING = 0.05  # passes that it counts for ever after: widths may not differ for thousands
# Passes without sharing, after sharing lost or failed. The longest are half a minute or so, in
# which whatever made the machine busy may have ended.
_FIRST_REST, _LONGEST_REST = 64, 4096
_PATIENCE = 8  # shared passes, before they are held against others
_WEIGHT = 0.1  # of the last shared pass, in how they compare
_SLICE_WEIGHT = 0.3  # of a prompt's last slice, in what its next tokens take
_LEAST_OF_ROW = 0.25  # of a scored row's time: what a token of a prompt takes at least

_log = logging.getLogger(__name__)


class PassTimes:
    """Fits what a pass takes: a fixed part and a part for each row, by least squares over the
    passes observed."""

    def __init__(self) -> None:
        self.fixed_s = self.row_s = 0.0
        self.num_observed = 0
        self._line = FadingLine(_REMEMBERED)
        self._first_rows = 0

    def at(self, rows: float) -> float:
        """Returns the seconds of a pass of so many rows."""
        return self.fixed_s + self.row_s * rows

    def rows_within(self, seconds: float) -> int:
        """Returns how many rows a pass of that time has; 0 where none fits."""
        if self.row_s <= 0:
            return 0
        return max(0, int((seconds - self.fixed_s) / self.row_s))

    def observe(self, rows: int, seconds: float) -> None:
        """Counts a pass."""
        if not self.num_observed:  # until widths differ, nothing tells the two parts apart
            self._first_rows = rows
            self._line.add(0, seconds / 2, _FAMILIARITY)
            self._line.add(_PRIOR_ROWS * rows, seconds / 2 * (1 + _PRIOR_ROWS), _FAMILIARITY)
        elif self.num_observed > 1:
            seconds = without_outlier(seconds, self.at(rows))
        self.num_observed += 1
        self._line.observe(rows, seconds)
        # A first pass of r rows, half of which is fixed, would take 0 seconds with -r rows.
        fixed_s, self.row_s = self._line.fit(-self._first_rows, _LASTING)
        self.fixed_s = max(0.0, fixed_s)


class SharingTimes:
    """What passes take, of one conversation or several. Where those of several take longer than
    one by one, or fail, they rest: conversations take turns for so many passes."""

    def __init__(self) -> None:
        self.all = PassTimes()  # without slices of prompts, whose rows take other times
        self._alone = PassTimes()  # of passes of one conversation
        self._ratio = 1.0  # of shared passes' time to what they would have taken one by one
        self._num_shared = 0  # since it was begun to compare
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST)  # in passes

    @property
    def rests(self) -> bool:
        return self._rests.resting > 0

    def count(self) -> None:
        """One pass more."""
        self._rests.count()

    def observe_alone(self, rows: int, seconds: float) -> None:
        self._alone.observe(rows, seconds)
        self.all.observe(rows, seconds)

    def observe_shared(self, rows: Sequence[int], seconds: float) -> None:
        """rows: of each conversation, all of which are scored."""
        self.all.observe(sum(rows), seconds)
        if self._alone.num_observed < _PATIENCE:
            return
        one_by_one_s = sum(self._alone.at(each) for each in rows)
        self._ratio += _WEIGHT * (seconds / one_by_one_s - self._ratio)
        self._num_shared += 1
        if self._num_shared < _PATIENCE:
            return
        if self._ratio <= 1:
            self._rests.reset()
        else:
            _log.info(
                "passes are not shared for a while: they took %.2f times as long as one by one",
                self._ratio,
            )
            self.rest()

    def observe_slices(
        self, scored: int, read: int, seconds: float, known_s: float | None
    ) -> float | None:
        """Returns what a token of a prompt takes, in seconds; it grows with the tokens before it.

        A pass of so many `scored` rows has `read` as many tokens of prompts beside them. known_s:
        what was returned for the slice before; None where that is not known."""
        if not self.all.num_observed:
            return known_s  # nothing tells the two apart
        token_s = max(seconds - self.all.at(scored), 0.0) / read
        token_s = max(token_s, _LEAST_OF_ROW * self.all.row_s)
        if known_s is None:
            return token_s
        return known_s + _SLICE_WEIGHT * (without_outlier(token_s, known_s) - known_s)

    def charges(self, rows: Sequence[int], seconds: float) -> list[float]:
        """What of a shared pass each conversation is charged for: what its rows take, and an equal
        part of what none of them takes. So a row is worth it to a conversation where it is to
        all."""
        shares = [self.all.fixed_s / len(rows) + self.all.row_s * each for each in rows]
        return [seconds * share / (sum(shares) or 1.0) for share in shares]

    def rest(self) -> None:
        self._rests.rest()
        self._ratio, self._num_shared = 1.0, 0
