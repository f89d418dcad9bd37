"""Makes a model's plan while an engine has nothing to do, in a process of its own.

That process ends as soon as an answer begins, and starts again once it is quiet: each place that
was measured by then is known. It converts nothing, opens no model where memory is short, and leaves
a machine alone that is busy or runs on its battery.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from edge_spec.core.isolated import Lifeline, isolated
from edge_spec.errors import EdgeSpecError
from edge_spec.fitting.devices import list_devices
from edge_spec.fitting.memory import free_bytes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.idle_process import IdleProcess, is_idle
from edge_spec.placement.pinning import wants_plan
from edge_spec.placement.plan import plan_path, save_plan
from edge_spec.placement.priority import give_way

SWITCH = "EDGE_SPEC_IDLE_PLAN"  # an environment variable; "0" turns it off
_MOST_S = 600.0  # that it may take in all
_ROOM = 3  # times a model's files, that has to be free for other runtimes' copies of it


def plan_when_idle(
    source: Source, options: LoadOptions, is_free: Callable[[], bool]
) -> IdleProcess | None:
    """Started; None where there is a plan, none is wanted, or a second copy of the model would not
    fit. is_free: whether other idle work is done."""
    if os.environ.get(SWITCH) == "0" or not wants_plan(source, options):
        return None
    free = free_bytes()
    if free is not None and free < _ROOM * source.num_bytes:
        return None
    plan = partial(_make_apart, source.model, *options.drafts)
    planner = IdleProcess(plan, lambda: is_free() and is_idle(), most_s=_MOST_S)
    planner.start()
    return planner


def make_plan(model: str, *drafts: str) -> None:
    """What the other process does. Raises an EdgeSpecError, OSError."""
    from edge_spec.placement.planner import Planner  # heavy, and another process needs it alone

    give_way(5)
    source = Source(model, _quiet)
    draft = Source(drafts[0], _quiet) if drafts else None
    planner = Planner(source, draft, list_devices(), _quiet, converts=False)
    plan = planner.make()
    if not planner.is_certain:
        raise EdgeSpecError("the machine was busy", remedy="Run edge-spec plan.")
    save_plan(plan, plan_path(source, draft))


def _make_apart(model: str, *arguments: str | Lifeline) -> None:
    *drafts, lifeline = arguments
    assert isinstance(lifeline, Lifeline)
    isolated(make_plan, model, *map(str, drafts), timeout_s=_MOST_S, lifeline=lifeline)


def _quiet(what: str, fraction: float) -> None: ...
