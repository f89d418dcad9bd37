"""Work that is done between answers: when it begins, what ends it, that it leaves the machine of a
user alone, and what is measured by it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_spec.core.isolated import IsolatedError, Lifeline
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import idle_process
from edge_spec.placement.idle_process import (
    IdleProcess,
    is_idle,
    measure_when_idle,
)

PATIENCE_S = 60.0  # after which a test fails that would otherwise wait for ever
FOR_EVER = [sys.executable, "-c", "import time; time.sleep(600)"]


class Plans:
    """Real processes: each call begins one that only its lifeline ends, until `may_end`."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.num_calls = 0
        self.may_end = False

    def __call__(self, lifeline: Lifeline) -> None:
        self.num_calls += 1
        if not self.may_end:
            with lifeline.start(FOR_EVER, {}) as process:
                self.begun.release()
                process.wait(PATIENCE_S)
            self.ended.release()
            raise IsolatedError("it was ended")
        self.begun.release()

    def wait_for_begin(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def plans() -> Plans:
    return Plans()


@pytest.fixture
def planner(plans: Plans) -> Iterator[IdleProcess]:
    planner = IdleProcess(plans, lambda: True, quiet_s=0.0)
    yield planner
    planner.close()


def answer(planner: IdleProcess) -> None:
    planner.pause()
    planner.resume()


def test_an_answer_ends_it_at_once_and_it_begins_again_afterwards(
    planner: IdleProcess, plans: Plans
) -> None:
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    planner.pause()
    assert plans.ended.acquire(timeout=PATIENCE_S)
    assert plans.num_calls == 1
    plans.may_end = True
    planner.resume()
    assert planner.join(PATIENCE_S) and plans.num_calls == 2


def test_it_waits_while_the_machine_is_busy(plans: Plans) -> None:
    plans.may_end = True
    asked = iter([False, False, True])
    planner = IdleProcess(plans, lambda: next(asked), quiet_s=0.0)
    planner.start()
    answer(planner)
    assert planner.join(PATIENCE_S) and plans.num_calls == 1
    assert next(asked, None) is None
    planner.close()


def test_closing_ends_the_process(planner: IdleProcess, plans: Plans) -> None:
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    planner.close()
    assert planner.is_done


@pytest.mark.parametrize(
    ("busy", "battery", "expected"),
    [(0.0, False, True), (None, False, True), (0.5, False, False), (0.0, True, False)],
)
def test_a_busy_machine_and_one_on_its_battery_are_left_alone(
    busy: float | None, battery: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_process, "busy_share", lambda: busy)
    monkeypatch.setattr(idle_process, "on_battery", lambda: battery)
    assert is_idle() == expected


# --- what is measured -------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(idle_process.SWITCH, raising=False)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    return Source(str(file), lambda what, fraction: None)


def begins(source: Source, options: LoadOptions) -> bool:
    process = measure_when_idle(source, options, "reference")
    if process is not None:
        process.close()
    return process is not None


def test_nothing_is_measured_where_it_is_not_wanted_or_has_no_room(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begins(source, LoadOptions()) and begins(source, LoadOptions(runtime="reference"))
    assert not begins(source, LoadOptions(quantization="int8"))  # of another conversion
    for free, expected in ((11, False), (None, True)):  # of a file of 4 bytes
        monkeypatch.setattr(idle_process, "free_bytes", lambda free=free: free)
        assert begins(source, LoadOptions()) == expected
    monkeypatch.setenv(idle_process.SWITCH, "0")
    assert not begins(source, LoadOptions())
