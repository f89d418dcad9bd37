"""Durations that something else has lengthened: another process, or a machine that slept."""

from __future__ import annotations

# Times the usual duration. Passes of one kind differ by far less on a quiet machine, and one that
# waits for another process takes ten times as long or more.
OUTLIER = 4.0


def without_outlier(seconds: float, usual_s: float) -> float:
    """Returns `seconds`, cut to what something of usually `usual_s` takes by itself at most."""
    return min(seconds, OUTLIER * usual_s)
