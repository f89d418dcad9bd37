"""Work in a process of its own: whatever happens to it is a reason in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any, TextIO

import pytest

from edge_spec.core.isolated import IsolatedError, isolated

DRIVERS = """
import os, sys, time

def adds(*parts):
    print("a driver loads", flush=True)
    return {"sum": "".join(parts)}

def refuses():
    raise ValueError("the driver is\\ntoo old")

def says_nothing():
    raise KeyError

def aborts():
    print("starting\\n\\nGPU  lost\\nat line 7" + 300 * "!", file=sys.stderr, flush=True)
    os.abort()

def ends():
    os._exit(3)

def waits(path):
    with open(path, "w") as pipe:
        print("here", file=pipe, flush=True)
        time.sleep(1000)

def hangs():
    sys.stdin.close()
    time.sleep(1000)

def tells(path):
    from edge_spec.core.isolated import tell
    tell(0.25)
    tell(0.5)
    waits(path)

def crashes_afterwards():
    import atexit
    atexit.register(os.abort)
    return "done"
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module above, which the other process can import, too."""
    (tmp_path / "pretended_drivers.py").write_text(DRIVERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return import_module("pretended_drivers")


def reason(work: Callable[..., Any], timeout_s: float = 60) -> str:
    with pytest.raises(IsolatedError) as caught:
        isolated(work, timeout_s=timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_result_comes_back_whatever_else_is_printed(drivers: Any) -> None:
    assert isolated(drivers.adds, "a b", "--c", "ü", timeout_s=60) == {"sum": "a b--cü"}


def test_an_exception_is_its_text(drivers: Any) -> None:
    assert reason(drivers.refuses) == "the driver is too old"
    assert reason(drivers.says_nothing) == "KeyError"


def test_a_crash_names_the_signal_and_the_last_words(drivers: Any) -> None:
    shown = "at line 7" + 191 * "!"
    assert reason(drivers.aborts) == f"the library ended the process (SIGABRT): GPU lost; {shown}"
    assert "(exit status 3): it printed nothing" in reason(drivers.ends)


def test_work_that_hangs_is_ended(drivers: Any) -> None:
    assert reason(drivers.hangs, timeout_s=0.5) == "there was no answer within 0.5 s"


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_an_interrupt_while_progress_is_told_ends_the_work(drivers: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told: list[float] = []
    opened: list[TextIO] = []

    def on_step(fraction: float) -> None:
        told.append(fraction)
        if fraction == 0.5:
            opened.append(pipe.open())
            assert opened[0].readline() == "here\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        isolated(drivers.tells, str(pipe), timeout_s=60, on_step=on_step)
    assert told == [0.25, 0.5]
    with opened[0]:
        assert opened[0].read() == ""  # nobody has it open any more


def test_no_module_comes_from_the_working_directory(
    drivers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "json.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(hostile)
    assert isolated(drivers.adds, timeout_s=60) == {"sum": ""}


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_work_ends_when_it_is_stopped(drivers: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(isolated, drivers.waits, str(pipe), timeout_s=60, stop=stop)
        with pipe.open() as open_pipe:
            assert open_pipe.readline() == "here\n"
            stop.set()
            assert open_pipe.read() == ""  # nobody has it open any more
    for again in (asked.result, partial(isolated, drivers.adds, timeout_s=60, stop=stop)):
        with pytest.raises(IsolatedError, match="not wanted any more"):
            again()


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_work_ends_with_a_process_that_is_killed(drivers: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "from pretended_drivers import waits; from edge_spec.core.isolated import isolated; "
        f"isolated(waits, {str(pipe)!r}, timeout_s=60)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as asking, pipe.open() as open_pipe:
        assert open_pipe.readline() == "here\n"
        asking.kill()
        assert open_pipe.read() == ""
