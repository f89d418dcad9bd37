"""Work in a process of its own that ends as soon as an answer begins, and starts again once it is
quiet; above all measuring installed runtimes, so that the next start knows which is the fastest.

Each runtime is measured in a process of its own, which gives way to all others. Nothing is
converted, nothing is opened where memory is short, and a machine that is busy or runs on its
battery is left alone.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Condition, Thread

from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.models.devices import free_bytes, processor
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidate_of, described
from edge_spec.placement.survey import measure_place
from edge_spec.scheduler.engine_plan import is_open
from edge_spec.scheduler.machine import busy_share, on_battery
from edge_spec.scheduler.profile import kept_profiles
from edge_spec.scheduler.row_findings import holds

LOWEST = 19  # of nice(2)
QUIET_S = 30.0  # after an answer, before anything begins
_MOST_BUSY = 0.2  # of all cores, with other work
SWITCH = "EDGE_SPEC_IDLE_PLAN"  # an environment variable; "0" turns it off
_MOST_S = 600.0  # that it may take in all
_PASSES_S = 15.0  # that the passes of one runtime may take
_ROOM = 3  # times a model's files, that has to be free for other runtimes' copies of it
_NICE = 5

_log = logging.getLogger(__name__)


class IdleProcess:
    """Calls `work` from a thread once no answer has been written for `quiet_s` seconds, with what
    an answer ends it by; calls it again later where that happened.

    work: raises IsolatedError where it failed or was ended. may_begin: asked before each call.
    repeats: it is also called again after it has ended by itself, until it fails.
    """

    def __init__(
        self,
        work: Callable[[Lifeline], object],
        may_begin: Callable[[], bool],
        quiet_s: float,
        most_s: float = math.inf,
        repeats: bool = False,
    ) -> None:
        self._work = work
        self._repeats = repeats
        self._may_begin = may_begin
        self._quiet_s = quiet_s
        self._left_s = most_s
        self._changed = Condition()
        self._num_answers = 0  # that are being written
        self._has_answered = False
        self._closed = False
        self._lifeline: Lifeline | None = None
        self._thread = Thread(target=self.run, name="edge-spec-idle", daemon=True)

    def start(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def pause(self) -> None:
        """Note that an answer begins; returns when nothing of this is running."""
        with self._changed:
            self._num_answers += 1
            self._end()

    def resume(self) -> None:
        """Note that an answer has ended."""
        with self._changed:
            self._num_answers -= 1
            self._has_answered = True
            self._changed.notify_all()

    def close(self) -> None:
        """Return when the thread has ended."""
        with self._changed:
            self._closed = True
            self._end()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    @property
    def is_done(self) -> bool:
        """Return whether the work is done, or will never be."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the work to be done, at most so long; returns `is_done`."""
        self._thread.join(timeout_s)
        return self.is_done

    def run(self) -> None:
        """Run in the thread until the work is done or cannot be, or until `close`."""
        while self._left_s > 0 and self._wait_until_quiet():
            if not self._may_begin():
                continue
            with self._changed:
                if self._closed or self._num_answers:
                    continue
                lifeline = self._lifeline = Lifeline()
            started_s = time.monotonic()
            with lifeline:
                try:
                    self._work(lifeline)
                    is_done = not self._repeats
                except IsolatedError as error:
                    is_done = not lifeline.has_ended  # it is called again where an answer began
                    if is_done:
                        _log.info("what was to be done while idle was not: %s", error)
            if is_done:
                return
            self._left_s -= time.monotonic() - started_s

    def _end(self) -> None:
        if self._lifeline is not None:
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


def is_idle() -> bool:
    """Return whether nobody else uses this machine, where that is known, and it does not run on its
    battery."""
    share = busy_share()
    return not on_battery() and (share is None or share <= _MOST_BUSY)


def give_way(nice: int) -> None:
    """Lower the priority of this process. Call it where a process of its own begins.

    nice: 1 to 19, as nice(2) has it; at 19 also Linux's idle scheduling (sched(7)). Where Linux
    groups processes by session, which it does by default, both count among processes of one
    session only, and the groups share a core evenly: so the process gets a session of its own,
    whose group is lowered. Windows keeps its priority.
    """
    if nice == LOWEST and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if hasattr(os, "nice"):
        os.nice(nice)
    if sys.platform == "linux":
        with suppress(OSError):  # it leads its session's processes already, or none are grouped
            os.setsid()
            Path("/proc/self/autogroup").write_text(f"{nice}\n", encoding="ascii")


def measure_when_idle(source: Source, options: LoadOptions, runtime: str) -> IdleProcess | None:
    """Start measuring; returns None where all is known, or a second copy of the model would not
    fit. runtime: that the engine has, the only one to measure where it was asked for."""
    if os.environ.get(SWITCH) == "0" or (options.quantization, options.block_size) != (None, None):
        return None
    free = free_bytes()
    if free is not None and free < _ROOM * source.num_bytes:
        return None
    names = unmeasured(source, options, runtime)
    if not names:
        return None
    work = partial(_measure_each, source.model, names, options.runtime_options)
    process = IdleProcess(work, is_idle, QUIET_S, _MOST_S)
    process.start()
    return process


def unmeasured(source: Source, options: LoadOptions, runtime: str) -> list[str]:
    """Name the runtimes that read the model as it is stored here, and have no profile of it."""
    names = runtimes.installed_runtimes() if is_open(options) else []
    known = {key.runtime for key, _ in kept_profiles(source) if holds(key, options.runtime_options)}
    found = []
    for name in dict.fromkeys((runtime, *names)):
        with suppress(EdgeSpecError):
            if name not in known and ModelPlan(source, name, options.runtime_options).is_there:
                found.append(name)
    return found


def _measure_each(
    model: str, names: Sequence[str], options: RuntimeOptions, lifeline: Lifeline
) -> None:
    """Raises IsolatedError where an answer has begun; a runtime that fails is passed over."""
    for name in names:
        place = described(model, processor(name), options)
        try:
            isolated(measure_described, place, timeout_s=_MOST_S, lifeline=lifeline)
        except IsolatedError as error:
            if lifeline.has_ended:
                raise
            _log.info("%s was not measured with %s while idle: %s", model, name, error)


def measure_described(place: str) -> None:
    """Measure in the other process, and keep what is found. Raises an EdgeSpecError, OSError."""
    give_way(_NICE)
    measure_place(candidate_of(place), _PASSES_S, lambda fraction: None)
