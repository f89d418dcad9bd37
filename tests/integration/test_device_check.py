"""`edge-spec doctor --run`: each check finds the fault that it is for, passes a device without it,
and what ends a check ends no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.diagnostics.doctor import device as device_check
from edge_spec.diagnostics.doctor.device import CHECKS, DeviceCheck, run_check, run_checks
from edge_spec.diagnostics.doctor.report import Finding, ok
from edge_spec.models.asked_options import AskedOptions

pytestmark = pytest.mark.usefixtures("faulty")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "CONTEXT_TOKENS", 96)
    monkeypatch.setattr(device_check, "PROMPTS", (12, 80))


@pytest.fixture
def on(faulty_model: str) -> Callable[[str], DeviceCheck]:
    def request(device: str) -> DeviceCheck:
        return DeviceCheck(faulty_model, AskedOptions(runtime="faulty", device=device))

    return request


def found(name: str, request: DeviceCheck) -> list[Finding]:
    """What the process of a check finds, as it comes from another process."""
    rows = json.loads(json.dumps(run_check(name, request.to_json())))
    return [Finding(**row) for row in rows]


def levels(findings: Any) -> list[str]:
    return [str(each.level) for each in findings]


@pytest.mark.parametrize("name", ["opens", "sessions", "lossless"])
def test_a_device_without_a_fault_passes(name: str, on: Any) -> None:
    told = set(levels(found(name, on("placed"))))
    assert told <= {"ok", "note"}
    assert ("ok" in told) == (name != "lossless")  # random weights agree with no draft


@pytest.mark.parametrize(
    ("device", "level", "told"),
    [
        ("wrong-trees", "fault", "of a tree "),
        ("wrong-chains", "fault", "of a chain "),
        ("no-numbers", "fault", "not numbers"),
        ("chains-only", "ok", "keep their promises"),
    ],
)
def test_chains_and_trees_are_told_apart(device: str, level: str, told: str, on: Any) -> None:
    first = found("sessions", on(device))[0]
    assert first.level == level and told in first.found


def test_a_whole_device_that_is_wrong_alike_is_found(on: Any) -> None:
    """It keeps all promises that can be held against itself."""
    row = found("sessions", on("wrong-trees"))[1]
    assert row.level == "fault" and "after 12 tokens, against faulty on the CPU" in row.found
    assert row.numbers["of_deviation"] > device_check.TOLERANCE


def test_the_real_load_error_is_the_finding(on: Any) -> None:
    (row,) = found("opens", on("refuses"))
    assert (row.level, row.found) == ("fault", "cannot load libfault.so.13")
    assert row.remedy == "Install it."


def test_texts_that_drafting_changes_are_found(on: Any) -> None:
    rows = found("lossless", on("wide-differs"))
    assert rows[0].level == "fault" and rows[0].found.startswith("greedy text")
    assert "expected" not in json.dumps([each.numbers for each in rows])  # what was written


class Inline:
    """Opens in this process, and finds all else to be well; those that are named end as processes
    may."""

    def __init__(self, ends: dict[str, BaseException] | None = None) -> None:
        self.names: list[str] = []
        self._ends = ends or {}

    def __call__(self, work: Any, *arguments: str, timeout_s: float) -> Any:
        self.names.append(arguments[0])
        if arguments[0] in self._ends:
            raise self._ends[arguments[0]]
        if arguments[0] == "opens":
            return work(*arguments)
        return [vars(ok(arguments[0], "as told"))]


@pytest.fixture
def command(
    faulty_model: str, monkeypatch: Any, capsys: Any, two_devices: None
) -> Callable[..., Any]:
    """command(device, isolate, *options): the exit status, and what was printed."""

    def doctor(device: str, isolate: Inline, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(device_check, "run_checks", partial(run_checks, isolate=isolate))
        told = ["--runtime", "faulty", "--device", device, "--run", *options]
        status = run(["doctor", faulty_model, *told])
        return status, capsys.readouterr().out

    return doctor


def test_a_crash_and_a_hang_are_findings_and_the_rest_goes_on(command: Any) -> None:
    crash = IsolatedError("the library ended the process (SIGABRT): it printed nothing")
    hang = IsolatedError("there was no answer within 30 s")
    isolate = Inline({"sessions": crash, "lossless": hang})
    status, out = command("cpu", isolate, "--json")
    report = json.loads(out)
    assert status == 1 and report["verdict"] == "faults" and isolate.names == list(CHECKS)
    wrong = {
        each["check"]: each["found"] for each in report["findings"] if each["level"] == "fault"
    }
    assert wrong == {"sessions": str(crash), "lossless": str(hang)}
    assert len(report["target"]["sha256"]) == 64


def test_an_interrupt_leaves_what_was_found(command: Any) -> None:
    status, out = command("cpu", Inline({"sessions": KeyboardInterrupt()}))
    assert status == 130
    assert "loaded in" in out and "further checks were not reached" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "reason"), [("aborts", "SIGABRT"), ("hangs", "there was no answer within")]
)
def test_a_process_that_crashes_or_hangs_takes_no_other_with_it(
    device: str, reason: str, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device_check, "CHECKS", {name: CHECKS[name] for name in ("opens", "sessions")}
    )
    limits_s = iter((60, 3 if device == "hangs" else 60))  # the first one answers

    def isolate(work: Any, *arguments: str, timeout_s: float) -> Any:
        return isolated(work, *arguments, timeout_s=next(limits_s))

    all_found = list(run_checks(on(device), lambda what, share: None, isolate))
    assert all_found[0].level == "ok"
    assert all_found[-1].level == "fault" and reason in all_found[-1].found
