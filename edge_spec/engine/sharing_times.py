"""What passes of one conversation and of several take, and how long to wait for who is due."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

from edge_spec.core.fading_line import FadingLine
from edge_spec.core.model import Session
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.scheduler.lossless import SLICE_TOKENS

_REMEMBERED = 1 - 1 / 32  # weight of the passes before
_PRIOR_ROWS = 4.0  # of a first pass, half of which is taken for fixed
_FAMILIARITY = 0.5  # passes that this counts for
_LASTING = 0.05  # passes that it counts for ever after: widths may not differ for thousands
# Passes without sharing, after sharing lost or failed. The longest are half a minute or so, in
# which whatever made the machine busy may have ended.
_FIRST_REST, _LONGEST_REST = 64, 4096
_PATIENCE = 8  # shared passes, before they are held against others
_WEIGHT = 0.1  # of the last shared pass, in how they compare
_SLICE_WEIGHT = 0.2  # of the last slice, in what a token adds
_LEAST_SLICE = 8  # tokens of a prompt beside rows of others, however long that takes
_LEAST_TOKEN_S = 1e-6

# Of the last pass: without who is waited for, the next one takes nearly as long.
_WAITING_SHARE = 0.5

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
        """Returns the seconds of a pass of `rows` rows."""
        return self.fixed_s + self.row_s * rows

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


class SliceTimes:
    """Learns what a token of a prompt adds to a pass of other rows."""

    def __init__(self, times: PassTimes) -> None:
        """times: of passes without slices of prompts."""
        self._times = times
        self._token_s: float | None = None

    def num_tokens(self, rows: int, room: int) -> int:
        """Returns how many tokens make a pass of these rows twice as long, so that those who write
        keep half of their rate; at most as many as there is room for."""
        if self._token_s is None:  # the first ones tell
            return min(room, SLICE_TOKENS)
        fitting = self._times.at(rows) / max(self._token_s, _LEAST_TOKEN_S)
        return min(room, max(_LEAST_SLICE, int(fitting)))

    def observe(self, rows: int, num_tokens: int, seconds: float) -> None:
        """Counts a pass of rows of others and tokens of a prompt."""
        if self._times.num_observed > 1:
            token_s = max(0.0, seconds - self._times.at(rows)) / num_tokens
            known_s = token_s if self._token_s is None else self._token_s
            self._token_s = known_s + _SLICE_WEIGHT * (token_s - known_s)


class SharingTimes:
    """Knows what passes of one conversation take and what those of several do. Where those of
    several take longer than one by one, or fail, sharing rests for a number of passes."""

    def __init__(self) -> None:
        self.all = PassTimes()
        self._alone = PassTimes()  # of passes of one conversation
        self._ratio = 1.0  # of shared passes' time to what they would have taken one by one
        self._num_shared = 0  # since it was begun to compare
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST)  # in passes

    @property
    def rests(self) -> bool:
        """True while conversations take turns."""
        return self._rests.resting > 0

    def count(self) -> None:
        """Counts a pass."""
        self._rests.count()

    def observe_alone(self, rows: int, seconds: float) -> None:
        """Counts what a conversation's own pass took."""
        self._alone.observe(rows, seconds)
        self.all.observe(rows, seconds)

    def observe_shared(self, rows: Sequence[int], seconds: float) -> None:
        """Counts what a shared pass took. rows: of each conversation."""
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

    def charges(self, rows: Sequence[int], seconds: float) -> list[float]:
        """Returns what of a shared pass each conversation is charged for: what its rows take, and
        an equal part of what none of them takes. So a row is worth it to a conversation where it is
        to all."""
        shares = [self.all.fixed_s / len(rows) + self.all.row_s * each for each in rows]
        return [seconds * share / (sum(shares) or 1.0) for share in shares]

    def rest(self) -> None:
        """Begins a rest: sharing has lost or failed."""
        self._rests.rest()
        self._ratio, self._num_shared = 1.0, 0


class Returns:
    """Times of conversations' passes, in seconds on one clock."""

    def __init__(self) -> None:
        self._patience_s = 0.0
        self._left_s: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._soon: WeakSet[Session] = WeakSet()  # that came in time, the last time

    def observe(self, seconds: float) -> None:
        """Notes how long a pass took, which says how long the next one may wait."""
        self._patience_s = _WAITING_SHARE * seconds

    def left(self, session: Session, now: float) -> None:
        """Notes that a conversation has had its pass."""
        self._left_s[session] = now

    def arrived(self, session: Session, now: float) -> None:
        """Notes that it wants another one."""
        left_s = self._left_s.pop(session, None)
        if left_s is None or now - left_s > self._patience_s:
            self._soon.discard(session)
        else:
            self._soon.add(session)

    def wait_s(self, now: float) -> float:
        """Returns how much longer to wait for those that are due; 0 where there are none."""
        due = [self._left_s[session] for session in self._soon if session in self._left_s]
        return max(0.0, max(due, default=now - self._patience_s) + self._patience_s - now)
