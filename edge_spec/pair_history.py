"""How often a pair's guesses were accepted when it was set up, and how often they are now.

A draft that falls behind its target, say after one of the two was tuned further, costs speed and
says nothing; this does. Kept for each pair and domain in a file of the cache.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from threading import Lock
from typing import Any

from edge_spec.metrics import Stats
from edge_spec.storage import atomic_file

SETUP_ROUNDS = 400  # with a guess, that a pair is first known by
_RECENT_ROUNDS = 400  # after which older ones count half, and so on
_MIN_ROUNDS = 100  # of late, before anything is said
_DROP = 0.05  # of the acceptance, below which nothing is said
_DEVIATIONS = 3.0  # between the two rates: 1 in 700 for a pair that has not changed

_log = logging.getLogger(__name__)


class PairHistory:
    """Counts rounds whose first guess was accepted, which depends least on how many were made.

    path: of the file; one that is missing or damaged begins anew. Any thread may use it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._domains: dict[str, dict[str, list[float]]] = _read(path)

    def observe(self, domain: str, stats: Stats) -> None:
        """Adds a finished generation."""
        rounds = float(sum(stats.acceptance_histogram.values()))
        right = rounds - stats.acceptance_histogram[0]
        if not rounds:
            return
        with self._lock:
            counts = self._domains.setdefault(domain, {"setup": [0.0, 0.0], "recent": [0.0, 0.0]})
            which = "setup" if counts["setup"][0] < SETUP_ROUNDS else "recent"
            seen = counts[which]
            if which == "recent" and seen[0] >= 2 * _RECENT_ROUNDS:
                seen[:] = [count / 2 for count in seen]
            seen[0] += rounds
            seen[1] += right

    def staleness(self, domain: str) -> str | None:
        """One line where guesses are accepted less often than when the pair was set up."""
        with self._lock:
            counts = self._domains.get(domain)
            if counts is None or min(counts["setup"][0], counts["recent"][0]) < _MIN_ROUNDS:
                return None
            (setup_rounds, setup_right), (rounds, right) = counts["setup"], counts["recent"]
        before, now = setup_right / setup_rounds, right / rounds
        mean = (setup_right + right) / (setup_rounds + rounds)
        deviation = math.sqrt(mean * (1 - mean) * (1 / setup_rounds + 1 / rounds))
        if before - now < max(_DROP, _DEVIATIONS * deviation):
            return None
        return (
            f"the draft is right in {now:.0%} of rounds ({domain}), {before:.0%} when this pair "
            "was set up: it may no longer belong to its target"
        )

    def findings(self) -> list[str]:
        """Of all domains."""
        found = (self.staleness(domain) for domain in sorted(self._domains))
        return [line for line in found if line is not None]

    def save(self) -> None:
        with self._lock:
            content = json.dumps(self._domains)
        try:
            with atomic_file(self._path) as work:
                work.write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            _log.warning("the acceptance of this pair is not kept: %s", error)


def _read(path: Path) -> dict[str, dict[str, list[float]]]:
    try:
        domains: Any = json.loads(path.read_text(encoding="utf-8"))
        for counts in domains.values():
            for which in ("setup", "recent"):
                rounds, right = counts[which]
                if not 0 <= right <= rounds < math.inf:
                    return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}
    found: dict[str, dict[str, list[float]]] = domains
    return found
