"""Work that is done between answers: when it begins, what ends it, and that it leaves the machine
of a user alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edge_spec.core.isolated import IsolatedError
from edge_spec.placement import idle_process
from edge_spec.placement.idle_process import IdleProcess, is_idle

PATIENCE_S = 60.0  # after which a test fails that would otherwise wait for ever


class Plans:
    """Each call begins work that only its event ends, until it `fails`."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.num_calls = 0
        self.fails = False

    def __call__(self, stop: threading.Event) -> None:
        self.num_calls += 1
        if self.fails:
            raise IsolatedError("it has failed")
        self.begun.release()
        assert stop.wait(PATIENCE_S)
        self.ended.release()
        raise IsolatedError("it was ended")

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


def has_ended(planner: IdleProcess) -> bool:
    planner._thread.join(PATIENCE_S)
    return not planner._thread.is_alive()


def test_an_answer_ends_it_at_once_and_it_begins_again_until_it_fails(
    planner: IdleProcess, plans: Plans
) -> None:
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    planner.pause()
    assert plans.ended.acquire(timeout=PATIENCE_S)
    assert plans.num_calls == 1
    plans.fails = True
    planner.resume()
    assert has_ended(planner) and plans.num_calls == 2


def test_it_waits_while_the_machine_is_busy(plans: Plans) -> None:
    plans.fails = True
    asked = iter([False, False, True])
    planner = IdleProcess(plans, lambda: next(asked), quiet_s=0.0)
    planner.start()
    answer(planner)
    assert has_ended(planner) and plans.num_calls == 1
    assert next(asked, None) is None
    planner.close()


def test_closing_ends_the_process(planner: IdleProcess, plans: Plans) -> None:
    planner.start()
    answer(planner)
    plans.wait_for_begin()
    planner.close()
    assert has_ended(planner)


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
