"""A process that gives way does so to other sessions, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_spec.placement.priority import LOWEST

TELLS = """
import json, os, sys
from pathlib import Path
from edge_spec.placement.priority import give_way
give_way(int(sys.argv[1]))
file = Path("/proc/self/autogroup")
group = file.read_text().split()[-1] if file.exists() else sys.argv[1]
policy = os.sched_getscheduler(0) if hasattr(os, "SCHED_IDLE") else None
print(json.dumps([os.nice(0), os.getsid(0) == os.getpid(), group, policy]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are grouped by Linux alone")
@pytest.mark.parametrize("nice", [5, LOWEST])
def test_a_process_that_gives_way_leaves_the_group_of_its_session_and_lowers_its_own(
    nice: int,
) -> None:
    own = Path("/proc/self/autogroup")
    before = own.read_text() if own.exists() else ""
    told = subprocess.run(
        [sys.executable, "-c", TELLS, str(nice)], capture_output=True, text=True, check=True
    )
    policy = os.SCHED_IDLE if nice == LOWEST else os.SCHED_OTHER
    lowered = min(os.nice(0) + nice, LOWEST)
    assert json.loads(told.stdout) == [lowered, True, str(nice), policy]
    assert (own.read_text() if own.exists() else "") == before
