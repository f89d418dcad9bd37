"""All checks in the order in which they are made, and what the process of one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edge_spec.diagnostics.accept.conformance import check_branches, check_chains
from edge_spec.diagnostics.accept.deadline import Deadline, OutOfTimeError
from edge_spec.diagnostics.accept.forecast import check_forecast
from edge_spec.diagnostics.accept.lossless import check_lossless
from edge_spec.diagnostics.accept.memory import check_memory
from edge_spec.diagnostics.accept.opening import check_draft, check_nodes, check_target
from edge_spec.diagnostics.accept.out_of_memory import check_out_of_memory
from edge_spec.diagnostics.accept.overlap import check_overlap
from edge_spec.diagnostics.accept.passes import check_passes
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, failed, out_of_time
from edge_spec.diagnostics.accept.soak import check_soak
from edge_spec.errors import EdgeSpecError

RunCheck = Callable[[AcceptRequest, Deadline], Iterator[CheckRow]]


@dataclass(frozen=True)
class Check:
    """share: of the time of the whole run. needs: the checks that have to have passed. steps: of
    one row, that it takes at the least and cannot be ended in; it is not begun where they take
    longer than it may."""

    name: str
    title: str
    share: float
    run: RunCheck
    needs: tuple[str, ...] = ("target",)
    of_pair: bool = False
    steps: int = 0


# Soak is the last, and gets what others leave, up to half of all time.
CHECKS = (
    Check("target", "Opening the model", 0.05, check_target, needs=()),
    Check("draft", "Opening the draft", 0.02, check_draft, needs=(), of_pair=True),
    Check("nodes", "Which device took which operator", 0.02, check_nodes),
    Check("chains", "Scoring chains", 0.05, check_chains),
    Check("trees", "Scoring trees", 0.04, check_branches),
    Check("verify", "Drafting against plain texts", 0.09, check_lossless, steps=700),
    Check("passes", "Timing passes", 0.08, check_passes),
    Check("memory", "Memory against its forecast", 0.03, check_memory),
    Check("out of memory", "Provoking too little memory", 0.03, check_out_of_memory),
    Check("forecast", "A plan's forecast against a bench", 0.14, check_forecast, steps=500),
    Check(
        "overlap",
        "Overlap on and off",
        0.05,
        check_overlap,
        needs=("target", "draft"),
        of_pair=True,
        steps=600,
    ),
    Check("soak", "Soak", 0.40, check_soak, steps=400),
)
BY_NAME = {check.name: check for check in CHECKS}


def run_check(name: str, request: str, seconds: str) -> list[dict[str, Any]]:
    """What another process runs, with arguments as a command line has them; returns rows as JSON.

    What the check found before it failed stays.
    """
    rows: list[CheckRow] = []
    try:
        # As it goes: those that were found before it raises are in the list.
        rows.extend(BY_NAME[name].run(AcceptRequest.from_json(request), Deadline(float(seconds))))
    except OutOfTimeError as error:
        rows.append(out_of_time("time", str(error)))
    except EdgeSpecError as error:
        rows.append(failed("error", error.shown, kind=type(error).__name__, remedy=error.remedy))
    except Exception as error:  # a library may fail in any way on a device that is new to it
        rows.append(failed("error", f"{type(error).__name__}: {error}", kind=type(error).__name__))
    return [row.of(name).to_dict() for row in rows]
