"""Learns what passes of a model take from the rounds of its answers, and keeps it after them.

Nothing is measured for it. Where nothing was known before, the first answers tell. What is kept
and what many rounds take contradict each other where the machine was busy when it was measured, or
is another one now: then what they take is kept instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from statistics import median
from threading import Lock

import numpy as np

from edge_spec.core.metrics import RoundStats
from edge_spec.exactness.sharing import wider as widened
from edge_spec.placement.measure import uncertainty
from edge_spec.placement.profile import MOST_SPREAD
from edge_spec.placement.row_findings import RowsKey, keep_seconds, known_seconds

_SHORT_TEXT = 1024  # tokens: passes after a longer one take longer, which says nothing of these
_FIRST = 16  # passes in all, before anything is kept where nothing is known
_FEWEST = 4  # passes of a width, before they tell anything
# A pass that is found faster than what is kept was so; a slower one may have had to wait for
# something else, so that it takes more of them, and what most of them took at least.
_FASTER, _SLOWER = 0.75, 1.5  # times what is kept
_FASTER_PASSES, _SLOWER_PASSES = 32, 256  # of a width
_MOST = 512  # passes of a width that are remembered


class RoundTimes:
    """Counts passes of all conversations on one model. Any thread may call."""

    def __init__(
        self, key: RowsKey, shares: Mapping[int, float], widths: tuple[int, ...] = ()
    ) -> None:
        """shares: what passes of some rows usually take over one of a single row. widths: that
        passes are widened to, ascending; none where they are not."""
        self._key = key
        self._shares = shares
        self._widths = widths
        self._kept: Mapping[int, float] | None = None  # before it was read
        self._passes: dict[int, list[float]] = {}  # seconds by rows, of answers that have ended
        self._current: dict[int, list[float]] = {}  # of those that are being written
        self._lock = Lock()

    def observe(self, round_stats: RoundStats) -> None:
        """Counts the pass of a round that no other conversation had a part in or was waiting
        for."""
        rows = widened(round_stats.num_rows, self._widths)
        if rows is not None and round_stats.num_sharing == 1 and round_stats.forward_s > 0:
            with self._lock:
                self._current.setdefault(rows, []).append(round_stats.forward_s)

    def end(self, num_tokens: int) -> None:
        """Counts an answer as ended, with this many tokens of text, and keeps what is new."""
        with self._lock:
            current, self._current = self._current, {}
            if num_tokens > _SHORT_TEXT:
                return
            for rows, seconds in current.items():
                self._passes[rows] = [*self._passes.get(rows, []), *seconds][-_MOST:]
            found = self._found()
            if found and known_seconds(self._key) == self._kept:  # else by another process
                keep_seconds(self._key, found)
                self._passes.clear()
            if found:
                self._kept = None

    def _found(self) -> dict[int, float]:
        """Returns t(k) if there is something new to keep."""
        if self._kept is None:
            self._kept = known_seconds(self._key)
        return self._contradicted() if self._kept else self._first()

    def _first(self) -> dict[int, float]:
        """Returns t(k) where enough was seen, on a machine that was free enough."""
        if sum(map(len, self._passes.values())) < _FIRST:
            return {}
        observed = {
            rows: median(seconds)
            for rows, seconds in self._passes.items()
            if len(seconds) >= _FEWEST and uncertainty(seconds) <= MOST_SPREAD
        }
        return rising(observed, in_proportion(self._shares, observed))

    def _contradicted(self) -> dict[int, float]:
        """Returns t(k) in place of what is kept, where passes of a width contradict that."""
        assert self._kept is not None
        observed, is_contradicted = {}, False
        for rows, seconds in self._passes.items():
            if rows not in self._kept or len(seconds) < _FEWEST:
                continue
            observed[rows] = median(seconds)
            faster = observed[rows] < _FASTER * self._kept[rows]
            least_s = float(np.quantile(seconds, 0.25))
            slower = least_s > _SLOWER * self._kept[rows]
            is_contradicted |= faster and len(seconds) >= _FASTER_PASSES
            is_contradicted |= slower and len(seconds) >= _SLOWER_PASSES
        if not is_contradicted:
            return {}
        # What all widths have in common is the machine; what one has beside it is its own.
        changes = [seconds / self._kept[rows] for rows, seconds in observed.items()]
        least = min(changes, key=lambda change: abs(log(change)))
        return rising(observed, {rows: least * each for rows, each in self._kept.items()})


def in_proportion(shares: Mapping[int, float], observed: Mapping[int, float]) -> dict[int, float]:
    """Returns t(k) at the widths of `shares`, each from the nearest one that was observed."""
    if not observed:
        return {}
    known = sorted(shares)
    usual = np.interp(sorted(observed), known, [shares[rows] for rows in known])
    units = {
        rows: observed[rows] / share for rows, share in zip(sorted(observed), usual, strict=True)
    }
    nearest = {rows: min(units, key=lambda each: (abs(each - rows), each)) for rows in known}
    return {rows: float(shares[rows] * units[nearest[rows]]) for rows in known}


def rising(observed: Mapping[int, float], estimates: Mapping[int, float]) -> dict[int, float]:
    """Returns t(k): what was observed, and estimates at other widths.

    No pass takes longer than one of more rows. What else the machine does makes some look as if
    they did, and none look faster than it is: so the time of the wider one holds.
    """
    found: dict[int, float] = {}
    least_s = inf
    for rows in sorted(observed, reverse=True):
        found[rows] = least_s = min(least_s, observed[rows])
    at_least_s = 0.0
    for rows in sorted({*observed, *estimates}):
        most_s = min((found[each] for each in observed if each >= rows), default=inf)
        at_least_s = max(at_least_s, found.get(rows, min(most_s, estimates.get(rows, 0.0))))
        found[rows] = at_least_s
    return dict(sorted(found.items()))
