"""How a process of its own lets whatever else runs on this machine go first."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

LOWEST = 19  # of nice(2)


def give_way(nice: int) -> None:
    """Lowers the priority of this process. Call it where a process of its own begins.

    nice: 1 to 19, as nice(2) has it; at 19 also Linux's idle scheduling (sched(7)). Where Linux
    groups processes by session, as it does unless told otherwise, both count among processes of one
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
