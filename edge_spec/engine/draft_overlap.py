"""Drafting for the next round while the target verifies this one."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from statistics import fmean, median
from threading import Event
from weakref import WeakKeyDictionary, WeakSet

from edge_spec.core.fading_line import FadingLine
from edge_spec.core.metrics import NoOverlap, RoundStats
from edge_spec.core.model import Session
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.drafters.protocol import Drafter
from edge_spec.exactness.sharing import SLICE_TOKENS

_BLOCK = 8  # rounds in a row with it, or without
_RECENT = 64  # rounds of one kind that are remembered
_ENOUGH = 48  # rounds compared, with it and without, before anything is said
HYSTERESIS = 0.03  # of a round's time, by which the other way has to be faster
_RETRY_BLOCKS = 16  # of the faster way, for each block of the other: 6 % of the rounds

_Kind = tuple[int, tuple[str, ...]]


class OverlappedDrafting:
    """Lets drafters draft on, in one thread for all rounds, as long as a block runs.

    trial: says when; None: in every round. Drafters and what they share with the target's thread,
    the sampler above all, are used by one thread at a time: the block has to leave them alone.
    """

    def __init__(self, drafters: Sequence[Drafter], trial: OverlapTrial | None = None) -> None:
        self.was_ready = False  # whether draft tokens of this round were made in the one before
        self.why_not: NoOverlap | None = None  # that they go on in this round
        self.goes_on = False  # whether they do
        self._drafters = drafters
        self._trial = trial
        self._thread = ThreadPoolExecutor(1, "edge-spec-draft")
        self._running: Future[None] | None = None
        self._stopped = Event()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Ends when the block and at most one pass of a draft have. Raises what a drafter raised
        that is not guarded."""
        ready = self.begin_round()
        if not ready:
            yield
            return
        self._stopped.clear()
        self._running = self._thread.submit(self._anticipate, ready)
        try:
            yield
        finally:
            self._stop()

    def begin_round(self) -> Sequence[Drafter]:
        """Returns the drafters that are to draft on in this round."""
        ready = [drafter for drafter in self._drafters if drafter.anticipates]
        self.was_ready = any(drafter.was_ready for drafter in ready)
        self.why_not = self._trial.why_not if ready and self._trial is not None else None
        self.goes_on = bool(ready) and self.why_not is None
        return ready if self.goes_on else ()

    def observe(self, round_stats: RoundStats) -> None:
        if self._trial is not None:
            self._trial.observe(round_stats)

    def close(self) -> None:
        self._stopped.set()
        self._thread.shutdown()

    def _anticipate(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            drafter.anticipate(self._stopped.is_set)

    def _stop(self) -> None:
        assert self._running is not None
        try:
            self._stopped.set()
            self._running.result()
        except KeyboardInterrupt:
            wait([self._running])  # nobody may use the draft before its pass has ended
            raise


class OverlapTrial:
    """Runs blocks of rounds with and without it, and then the faster way, with a block of the other
    now and then, since texts and machines change.

    Compared are rounds that verified as many draft tokens of the same drafters: what overlap
    changes is their time, and their number would hide that. What was drafted in advance is right in
    some rounds and useless in others, so it is the mean that counts, without outliers.

    begins: whether the first block is one with it; one without is right where the two devices were
    measured to slow each other down by more than overlap can win.
    """

    def __init__(self, begins: bool = True) -> None:
        self.on = begins
        self._faster: bool | None = None if begins else False  # with it; None: not known yet
        self._left = _BLOCK  # rounds of the block
        self._rests = SpacedRetries(_RETRY_BLOCKS, _RETRY_BLOCKS)  # of the slower way, in blocks
        self._rests.begin()
        self._first = True  # of a block: its draft tokens were made in the one before
        self._seconds: dict[bool, dict[_Kind, deque[float]]] = {
            way: defaultdict(lambda: deque(maxlen=_RECENT)) for way in (False, True)
        }

    @property
    def why_not(self) -> NoOverlap | None:
        """Why this round is one without it, if it is."""
        if self.on:
            return None
        return NoOverlap.SLOWER if self._faster is False else NoOverlap.COMPARISON

    def observe(self, round_stats: RoundStats) -> None:
        """A round that ran as `on` said; rounds without a draft token tell nothing."""
        if round_stats.plain_reason is not None:
            return
        if not self._first:
            kind = round_stats.num_draft_tokens, tuple(sorted(round_stats.by_drafter))
            self._seconds[self.on][kind].append(round_stats.total_s)
        self._first = False
        self._left -= 1
        if not self._left:
            self._judge()
            self._next_block()

    def _next_block(self) -> None:
        self._left, before = _BLOCK, self.on
        if self._faster is None:
            self.on = not self.on
        elif self.on is not self._faster or self._rests.resting:
            self.on = self._faster
            self._rests.count()
        else:
            self.on = not self._faster
            self._rests.rest()
        self._first = self.on is not before

    def _judge(self) -> None:
        ratio = self._ratio()
        if ratio is None:
            return
        if self._faster:
            self._faster = ratio < 1 + HYSTERESIS
        else:
            self._faster = ratio < 1 - HYSTERESIS

    def _ratio(self) -> float | None:
        """The time of rounds with it over that of the same rounds without; None: too few."""
        rounds, with_s, without_s = 0, 0.0, 0.0
        for kind, seconds in self._seconds[True].items():
            others = self._seconds[False].get(kind, ())
            count = min(len(seconds), len(others))
            if count:
                rounds += count
                with_s += count * _mean(seconds)
                without_s += count * _mean(others)
        return with_s / without_s if rounds >= _ENOUGH and without_s else None


def _mean(seconds: deque[float] | tuple[float, ...]) -> float:
    usual_s = median(seconds)
    return fmean(without_outlier(each, usual_s) for each in seconds)


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

_log = logging.getLogger(__name__)
_WAITING_SHARE = (
    0.5  # of the last pass: without who is waited for, the next one takes nearly as long
)


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
