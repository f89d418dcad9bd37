"""A plan that is made between answers: when it begins, what ends it, and that it leaves the user's
machine alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import idle_plan, idle_process, machine
from edge_spec.placement.background import InTurns
from edge_spec.placement.idle_plan import plan_when_idle
from edge_spec.placement.idle_process import IdleProcess

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


def ended(planner: IdleProcess) -> bool:
    planner._thread.join(PATIENCE_S)
    return not planner._thread.is_alive()


def test_it_is_made_once_after_the_first_answer(planner: IdleProcess, plans: Plans) -> None:
    plans.may_end = True
    planner.start()
    assert not plans.num_calls
    answer(planner)
    assert ended(planner) and plans.num_calls == 1


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
    assert ended(planner) and plans.num_calls == 2


def test_what_fails_is_not_tried_again(planner: IdleProcess, plans: Plans) -> None:
    def fail(lifeline: Lifeline) -> None:
        plans.num_calls += 1
        raise IsolatedError("nothing fits")

    failing = IdleProcess(fail, lambda: True, quiet_s=0.0)
    failing.start()
    answer(failing)
    assert ended(failing) and plans.num_calls == 1
    failing.close()


def test_it_waits_while_the_machine_is_busy(plans: Plans) -> None:
    plans.may_end = True
    asked = iter([False, False, True])
    planner = IdleProcess(plans, lambda: next(asked), quiet_s=0.0)
    planner.start()
    answer(planner)
    assert ended(planner) and plans.num_calls == 1
    assert next(asked, None) is None
    planner.close()


def test_all_attempts_together_take_no_longer_than_they_may(plans: Plans) -> None:
    planner = IdleProcess(plans, lambda: True, quiet_s=0.0, most_s=1e-6)
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    answer(planner)
    assert ended(planner) and plans.num_calls == 1
    planner.close()


def test_closing_ends_the_process(planner: IdleProcess, plans: Plans) -> None:
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    planner.close()
    assert not planner._thread.is_alive()


def test_a_lifeline_that_has_ended_starts_nothing() -> None:
    with Lifeline() as lifeline:
        lifeline.end()
        with pytest.raises(IsolatedError, match="not wanted"):
            isolated(machine.cpu_name, timeout_s=PATIENCE_S, lifeline=lifeline)


def test_works_in_turns_are_paused_together_and_closed_from_the_last_on() -> None:
    told: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def pause(self) -> None:
            told.append(f"pause {self.name}")

        def resume(self) -> None:
            told.append(f"resume {self.name}")

        def close(self) -> None:
            told.append(f"close {self.name}")

    works = InTurns([Work("a"), Work("b")])
    works.pause()
    works.resume()
    works.close()
    assert told == ["pause a", "pause b", "resume a", "resume b", "close b", "close a"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(idle_plan.SWITCH, raising=False)
    monkeypatch.setattr(idle_plan, "free_bytes", lambda: 10**9)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    return Source(str(file), lambda what, fraction: None)


def begins(source: Source, options: LoadOptions) -> bool:
    planner = plan_when_idle(source, options, lambda: False)
    if planner is not None:
        planner.close()
    return planner is not None


def test_none_is_made_where_it_is_not_wanted_or_has_no_room(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begins(source, LoadOptions())
    assert not begins(source, LoadOptions(runtime="llamacpp"))
    assert not begins(source, LoadOptions(drafter="suffix"))
    monkeypatch.setattr(idle_plan, "free_bytes", lambda: 11)  # of a file of 4 bytes
    assert not begins(source, LoadOptions())
    monkeypatch.setattr(idle_plan, "free_bytes", lambda: None)
    assert begins(source, LoadOptions())
    monkeypatch.setenv(idle_plan.SWITCH, "0")
    assert not begins(source, LoadOptions())


@pytest.mark.parametrize(
    ("busy", "battery", "expected"),
    [(0.0, False, True), (None, False, True), (0.5, False, False), (0.0, True, False)],
)
def test_a_busy_machine_and_one_on_its_battery_are_left_alone(
    busy: float | None, battery: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_process, "busy_share", lambda: busy)
    monkeypatch.setattr(idle_process, "on_battery", lambda: battery)
    assert idle_process.is_idle() == expected


def test_how_busy_the_cores_are_is_a_share_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[100, 0, 0, 800, 100, 0, 0, 0], [130, 0, 10, 850, 110, 0, 0, 0]])
    monkeypatch.setattr(machine, "_core_times", lambda: next(times))
    assert machine.busy_share(0.0) == pytest.approx(0.4)  # 30 + 10 of 100
    monkeypatch.setattr(machine, "_core_times", lambda: None)
    assert machine.busy_share(0.0) is None
