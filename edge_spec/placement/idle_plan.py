"""Makes a model's plan while an engine has nothing to do, in a process of its own.

That process ends as soon as an answer begins, and starts again once it is quiet: each place that
was measured by then is known. It converts nothing, opens no model where memory is short, and leaves
a machine alone that is busy or runs on its battery.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from threading import Condition, Thread

from edge_spec.errors import EdgeSpecError
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.devices import list_devices
from edge_spec.placement.isolated import IsolatedError, Lifeline, isolated
from edge_spec.placement.machine import busy_share, on_battery
from edge_spec.placement.memory import free_bytes
from edge_spec.placement.pinning import wants_plan
from edge_spec.placement.plan import plan_path, save_plan

SWITCH = "EDGE_SPEC_IDLE_PLAN"  # an environment variable; "0" turns it off
_QUIET_S = 30.0  # after an answer, before anything begins
_MOST_S = 600.0  # that it may take in all
_MOST_BUSY = 0.2  # of all cores, with other work
_ROOM = 3  # times a model's files, that has to be free for other runtimes' copies of it

_log = logging.getLogger(__name__)


def plan_when_idle(
    source: Source, options: LoadOptions, is_free: Callable[[], bool]
) -> IdlePlanner | None:
    """Started; None where there is a plan, none is wanted, or a second copy of the model would not
    fit. is_free: whether other idle work is done."""
    if os.environ.get(SWITCH) == "0" or not wants_plan(source, options):
        return None
    free = free_bytes()
    if free is not None and free < _ROOM * source.num_bytes:
        return None
    plan = partial(_make_apart, source.model, *options.drafts)
    planner = IdlePlanner(plan, lambda: is_free() and _is_idle())
    planner.start()
    return planner


class IdlePlanner:
    """Calls `plan` from a thread once no answer has been written for `quiet_s` seconds, with what
    an answer ends it by; calls it again later where that happened.

    plan: raises IsolatedError where it failed or was ended. may_begin: asked before each call.
    """

    def __init__(
        self,
        plan: Callable[[Lifeline], object],
        may_begin: Callable[[], bool],
        quiet_s: float = _QUIET_S,
        most_s: float = _MOST_S,
    ) -> None:
        self._plan = plan
        self._may_begin = may_begin
        self._quiet_s = quiet_s
        self._left_s = most_s
        self._changed = Condition()
        self._num_answers = 0  # that are being written
        self._has_answered = False
        self._closed = False
        self._lifeline: Lifeline | None = None
        self._interrupted = False  # the call that is being made
        self._thread = Thread(target=self.run, name="edge-spec-plan", daemon=True)

    def start(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def pause(self) -> None:
        """An answer begins; returns when nothing of this is running."""
        with self._changed:
            self._num_answers += 1
            self._end()

    def resume(self) -> None:
        """That answer has ended."""
        with self._changed:
            self._num_answers -= 1
            self._has_answered = True
            self._changed.notify_all()

    def close(self) -> None:
        """Returns when the thread has ended."""
        with self._changed:
            self._closed = True
            self._end()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def run(self) -> None:
        """What the thread does: returns when the plan is made or cannot be, or after `close`."""
        while self._left_s > 0 and self._wait_until_quiet():
            if not self._may_begin():
                continue
            with self._changed:
                if self._closed or self._num_answers:
                    continue
                lifeline = self._lifeline = Lifeline()
                self._interrupted = False
            started_s = time.monotonic()
            try:
                with lifeline:
                    self._plan(lifeline)
                return
            except IsolatedError as error:
                if not self._interrupted:
                    _log.info("no plan was made while idle: %s", error)
                    return
            finally:
                self._left_s -= time.monotonic() - started_s

    def _end(self) -> None:
        if self._lifeline is not None:
            self._interrupted = True
            self._lifeline.end()
        self._changed.notify_all()

    def _wait_until_quiet(self) -> bool:
        """False once it is closed."""
        with self._changed:
            while not self._closed:
                is_idle = self._has_answered and not self._num_answers
                changed = self._changed.wait(self._quiet_s if is_idle else None)
                if is_idle and not changed:
                    return True
            return False


def make_plan(model: str, *drafts: str) -> None:
    """What the other process does. Raises an EdgeSpecError, OSError."""
    from edge_spec.placement.planner import Planner  # heavy, and another process needs it alone

    if hasattr(os, "nice"):
        os.nice(5)
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


def _is_idle() -> bool:
    busy = busy_share()
    return not on_battery() and (busy is None or busy <= _MOST_BUSY)


def _quiet(what: str, fraction: float) -> None: ...
