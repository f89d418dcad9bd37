"""Processes that are killed while they write leave nothing that misloads: benchmarks/kills.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROUNDS = 100
# Files that are written where they stay, as a writer would that knows of no kill.
PLAIN = """
import sys
from contextlib import contextmanager
import kills
from edge_spec.storage import measurements as kept_file
from edge_spec.engine import snapshot_file
from edge_spec.exporters.gguf import export

@contextmanager
def plain(final, mode=0o644):
    yield final

for module in (kept_file, snapshot_file, export):
    module.atomic_file = plain
choose = kills.operations
def some(folder, hub):
    found = choose(folder, hub)
    return {name: found[name] for name in ("snapshot", "gguf")}
kills.operations = some
kills.main()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="needs a system whose libraries survive a fork"
    ),
]


def killed(program: list[str], rounds: int, out: Path) -> Any:
    command = [sys.executable, *program, "--rounds", str(rounds), "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stderr


def test_what_a_killed_writer_leaves_never_misloads(tmp_path: Path) -> None:
    found, told = killed([str(BENCHMARKS / "kills.py")], ROUNDS, tmp_path / "kills.json")
    assert (found["kills"], found["misloads"]) == (ROUNDS, 0), told
    assert len(found["by_operation"]) == 7
    assert min(each["kills"] for each in found["by_operation"].values()) >= 9


def test_a_writer_that_does_not_care_is_found_out(tmp_path: Path) -> None:
    found, told = killed(["-c", PLAIN], 30, tmp_path / "kills.json")
    # Which files were cut, and how each says so, follows from when the kills came.
    assert found["misloads"] > 0 and "Error(" in told
