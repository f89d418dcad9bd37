"""Work in a process of its own that ends as soon as an answer begins, and starts again once it is
quiet. A machine that is busy or runs on its battery is left alone."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from edge_spec.core.isolated import IsolatedError, Lifeline
from edge_spec.scheduler.machine import busy_share, on_battery

LOWEST = 19  # of nice(2)
_MOST_BUSY = 0.2  # of all cores, with other work

_log = logging.getLogger(__name__)


class IdleProcess:
    """Calls `work` from a thread whenever no answer has been written for `quiet_s` seconds, until
    it fails.

    work: takes the Lifeline that ends its process when an answer begins; raises IsolatedError where
    it failed or was ended. may_begin: asked before each call.
    """

    def __init__(
        self, work: Callable[[Lifeline], object], may_begin: Callable[[], bool], quiet_s: float
    ) -> None:
        self._work = work
        self._may_begin = may_begin
        self._quiet_s = quiet_s
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

    def run(self) -> None:
        """Run in the thread until the work has failed, or until `close`."""
        while self._wait_until_quiet():
            if not self._may_begin():
                continue
            with self._changed:
                if self._closed or self._num_answers:
                    continue
                lifeline = self._lifeline = Lifeline()
            with lifeline:
                try:
                    self._work(lifeline)
                except IsolatedError as error:
                    if not lifeline.has_ended:  # it is called again where an answer began
                        _log.info("what was to be done while idle was not: %s", error)
                        return

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
