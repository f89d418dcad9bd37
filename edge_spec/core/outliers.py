"""Durations lengthened by something else: another process, or a machine that slept."""

from __future__ import annotations

# Multiple of the usual duration. On a quiet machine, passes of one kind differ far less; one that
# waits for another process takes ten times as long or more.
OUTLIER = 4.0


def without_outlier(seconds: float, usual_s: float) -> float:
    """Bound `seconds` by OUTLIER times the usual duration."""
    return min(seconds, OUTLIER * usual_s)
