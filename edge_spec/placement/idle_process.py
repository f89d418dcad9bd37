"""Work in a separate process that ends when an answer begins and restarts when all is quiet, unless
the machine is busy or on battery."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Event, Thread

from edge_spec.core.isolated import IsolatedError
from edge_spec.scheduler.machine import busy_share, on_battery

LOWEST = 19  # of nice(2)
_MOST_BUSY = 0.2  # of all cores, by other work

_log = logging.getLogger(__name__)


class IdleProcess:
    """Calls `work` in a thread whenever no answer was written for `quiet_s` seconds, until it
    fails. work: takes an event that is set when an answer begins, and ends then; raises
    IsolatedError if it fails or is ended. may_begin: called before each start."""

    def __init__(
        self, work: Callable[[Event], object], may_begin: Callable[[], bool], quiet_s: float
    ) -> None:
        self._work = work
        self._may_begin = may_begin
        self._quiet_s = quiet_s
        self._changed = Condition()
        self._num_answers = 0  # being written
        self._has_answered = False
        self._closed = False
        self._stop = Event()
        self._thread = Thread(target=self.run, name="edge-spec-idle", daemon=True)

    def start(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def pause(self) -> None:
        """Note that an answer begins, which ends the work."""
        with self._changed:
            self._num_answers += 1
            self._end()

    def resume(self) -> None:
        with self._changed:
            self._num_answers -= 1
            self._has_answered = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread to end."""
        with self._changed:
            self._closed = True
            self._end()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def run(self) -> None:
        """Run in the thread until the work fails or `close` is called."""
        while self._wait_until_quiet():
            if not self._may_begin():
                continue
            with self._changed:
                if self._closed or self._num_answers:
                    continue
                stop = self._stop = Event()
            try:
                self._work(stop)
            except IsolatedError as error:
                if not stop.is_set():  # if an answer ended it, it is called again
                    _log.info("what was to be done while idle was not: %s", error)
                    return

    def _end(self) -> None:
        self._stop.set()
        self._changed.notify_all()

    def _wait_until_quiet(self) -> bool:
        with self._changed:
            while not self._closed:
                is_idle = self._has_answered and not self._num_answers
                changed = self._changed.wait(self._quiet_s if is_idle else None)
                if is_idle and not changed:
                    return True
            return False


def is_idle() -> bool:
    """Return whether the machine is idle, as far as known, and not on battery."""
    share = busy_share()
    return not on_battery() and (share is None or share <= _MOST_BUSY)


def give_way(nice: int) -> None:
    """Lower this process's priority; call it where a process begins.

    nice: 1 to 19, as in nice(2); 19 adds Linux's idle scheduling (sched(7)). Linux by default
    groups processes by session, applies both only within one, and shares a core evenly between
    groups; so the process gets its own session, with a lowered group. Windows keeps its priority.
    """
    if nice == LOWEST and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if hasattr(os, "nice"):
        os.nice(nice)
    if sys.platform == "linux":
        with suppress(OSError):  # already a session leader, or no grouping
            os.setsid()
            Path("/proc/self/autogroup").write_text(f"{nice}\n", encoding="ascii")
