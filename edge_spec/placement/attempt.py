"""Work at a place that may fail: on another device than the processor in a process of its own,
since a driver may crash, hang, or take the memory of all.

For the processor that would take longer than a small model's passes; what its libraries raise is a
reason, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated, reason_of, tell
from edge_spec.placement.candidates import Candidate, candidate_of, described
from edge_spec.placement.place_work import WORKS, OnStep, PlaceWork

_TIMEOUT_S = 300.0  # more than a driver takes to compile its kernels, and we to measure


class PlaceError(Exception):
    """A place did not do its work; `str()` is the reason, one line. is_silent: it never
    answered, and is not worth waiting for again."""

    def __init__(self, reason: str, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


def attempt(
    work: PlaceWork,
    place: Candidate,
    argument: Any,
    on_step: OnStep,
    others: Sequence[Candidate] = (),
) -> Any:
    """Returns what `work`, one of WORKS, makes of `argument`. others: places that it uses, too.
    Raises PlaceError."""
    if not any(each.is_risky for each in (place, *others)):
        try:
            return work(place, argument, on_step)
        except Exception as error:  # as in the other process
            raise PlaceError(reason_of(error)) from error
    request = {"work": work.__name__, "place": described(place), "argument": argument}
    done = 0.0

    def on_done(fraction: float) -> None:
        nonlocal done
        done = fraction
        on_step(fraction)

    with TemporaryDirectory() as directory:
        file = Path(directory) / "request"  # longer than a command line may be
        file.write_text(json.dumps(request), encoding="utf-8")
        try:
            return isolated(do_request, str(file), timeout_s=_TIMEOUT_S, on_step=on_done)
        except NoAnswerError as error:
            slow = f"it is too slow: {done:.0%} was done within {_TIMEOUT_S:g} s"
            raise PlaceError(slow if done else str(error), is_silent=True) from error
        except IsolatedError as error:
            raise PlaceError(str(error)) from error


def do_request(file: str) -> Any:
    """Does the work in the other process. Raises an EdgeSpecError, OSError, and whatever a library
    raises."""
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    place = candidate_of(request["place"])
    return WORKS[request["work"]](place, request["argument"], tell)
