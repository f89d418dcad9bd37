"""`edge-spec accept` as a command: what ends a check ends no other, and what is written is fit for
others' eyes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edge_spec.cli.main import run
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.diagnostics.accept import report as report_module
from edge_spec.diagnostics.accept import runner as runner_module
from edge_spec.diagnostics.accept.checks import BY_NAME, CHECKS
from edge_spec.diagnostics.accept.report import html_page, print_report
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import Mark, passed
from edge_spec.diagnostics.accept.runner import AcceptRun
from fixtures import faulty_runtime

pytestmark = pytest.mark.usefixtures("faulty")


class Inline:
    """Runs the first checks in this process, and finds the others to be passed; those that are
    named end as processes may."""

    def __init__(self, ends: dict[str, BaseException] | None = None) -> None:
        self.names: list[str] = []
        self._ends = ends or {}

    def __call__(self, work: Any, *arguments: str, timeout_s: float) -> Any:
        self.names.append(arguments[0])
        if arguments[0] in self._ends:
            raise self._ends[arguments[0]]
        if arguments[0] in ("target", "nodes"):
            return work(*arguments)
        return [passed("as told", "in no time").of(arguments[0]).to_dict()]


@pytest.fixture
def command(faulty_model: str, tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[..., Any]]:
    """command(device, isolate): the exit status and what was written."""
    listed = faulty_runtime.FaultyRuntime().devices(RuntimeOptions())
    monkeypatch.setattr("edge_spec.fitting.devices.list_devices", lambda: listed)

    # It would watch the machine for half a second each time.
    monkeypatch.setattr(report_module, "busy_share", lambda: None)

    def accept(device: str, isolate: Inline, *told: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(runner_module, "AcceptRun", partial(AcceptRun, isolate=isolate))
        out = tmp_path / "out"
        status = run(["accept", faulty_model, "--device", device, "--out", str(out), *told])
        (data,) = out.glob("*.json")
        return status, json.loads(data.read_text(encoding="ascii"))

    yield accept


def test_a_crash_and_a_hang_are_rows_and_the_rest_goes_on(command: Any, capsys: Any) -> None:
    crash = IsolatedError("the library ended the process (SIGABRT): it printed nothing")
    hang = IsolatedError("there was no answer within 30 s")
    isolate = Inline({"trees": crash, "passes": hang})
    status, report = command("cpu", isolate)
    assert status == 1 and report["verdict"] == "failed"
    rows = {(row["check"], row["name"]): row for row in report["rows"]}
    assert rows["trees", "process"]["found"] == str(crash)
    assert rows["passes", "process"]["found"] == str(hang)
    assert rows["target", "opens"]["mark"] == "passed"
    assert isolate.names[-1] == "soak" and not {"draft", "overlap"} & set(isolate.names)
    assert rows["overlap", "not tried"]["mark"] == "not measured"
    assert (report["schema"], report["version"]) == ("edge-spec-accept", 1)
    counted = [row["mark"] for row in report["rows"]]
    assert report["failed"] == counted.count("failed") == 2
    assert "FAILED" in capsys.readouterr().out


def test_nothing_is_tried_on_a_device_that_does_not_open(command: Any, capsys: Any) -> None:
    isolate = Inline()
    status, report = command("refuses", isolate, "--json")
    assert status == 1 and isolate.names == ["target"]
    assert json.loads(capsys.readouterr().out)["rows"] == report["rows"]
    reasons = {row["check"]: row["found"] for row in report["rows"]}
    assert reasons["devices"] == "a device for tests: the driver is too old"
    assert reasons["target"] == "cannot load libfault.so.13"
    assert reasons["soak"] == "the target did not open"


def test_an_interrupt_writes_what_is_there(command: Any) -> None:
    isolate = Inline({"chains": KeyboardInterrupt()})
    status, report = command("cpu", isolate)
    assert status == 130 and report["interrupted"] and report["verdict"] == "incomplete"
    rows = {row["check"]: (row["mark"], row["name"]) for row in report["rows"]}
    assert rows["target"] == ("passed", "opens")
    assert rows["chains"] == rows["soak"] == ("not measured", "interrupted")
    assert set(rows) == {"devices", *(each.name for each in CHECKS)}


def test_the_report_is_written_after_each_check(faulty_model: str) -> None:
    """The next one may take the machine down."""
    written: list[int] = []
    request = AcceptRequest(faulty_model, "cpu", "faulty")
    made = AcceptRun(request, 60, lambda what, fraction: None, lambda: None, isolate=Inline())
    made.on_rows = lambda: written.append(len(made.rows))
    made.run(faulty_runtime.FaultyRuntime().devices(None))  # type: ignore[arg-type]
    assert len(written) == 1 + len(CHECKS) and written == sorted(written) and written[0]


def test_nothing_of_the_users_own_is_in_it(
    command: Any, faulty_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jo.doe"))
    told = (
        f"cannot open {tmp_path}/private/weights.bin, /home/jo.doe/x.gguf; {faulty_model}: jo.doe"
    )
    told += r" and C:\Users\jo.doe\lib.dll"
    _, report = command("cpu", Inline({"chains": IsolatedError(told)}))
    text = json.dumps(report)
    assert not any(each in text for each in (str(tmp_path), "jo.doe", "private", "Users"))
    row = next(row for row in report["rows"] if row["check"] == "chains")
    kept = ("weights.bin", "x.gguf", "tiny.gguf", "lib.dll")
    assert all(name in row["found"] for name in kept)
    assert report["models"]["target"]["name"] == "tiny"
    assert len(report["models"]["target"]["sha256"]) == 64
    page = html_page(report)
    assert "<script" not in page and "://" not in page and "sha256" in page


def test_the_page_escapes_what_devices_say(command: Any) -> None:
    _, report = command("cpu", Inline({"chains": IsolatedError("<script>alert(1)</script>")}))
    assert "<script" not in html_page(report) and "&lt;script" in html_page(report)


def test_a_narrow_terminal_folds_and_loses_nothing(command: Any) -> None:
    _, report = command("cpu", Inline())
    out = StringIO()
    print_report(report, Console(file=out, width=44, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 44
    assert "".join(lines).count("not measured") == report["not_measured"] + 1


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (["--minutes", "0"], "minutes is 0"),
        (["--minutes", "nan"], "minutes is nan"),
        (["--draft-device", "cpu"], "--draft-device is for a draft"),
        (["--out", "{model}"], "cannot write into"),
    ],
)
def test_bad_usage_is_one_line(faulty_model: str, told: list[str], fault: str, capsys: Any) -> None:
    told = [each.format(model=faulty_model) for each in told]
    assert run(["accept", faulty_model, "--device", "cpu", *told]) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("aborts", "the library ended the process (SIGABRT)"),
        ("hangs", "there was no answer within"),
    ],
)
def test_a_process_that_crashes_or_hangs_takes_no_other_with_it(
    device: str, found: str, faulty_model: str
) -> None:
    """For real, in processes of their own."""
    checks = [replace(BY_NAME[name], share=0.06) for name in ("target", "trees", "nodes")]
    request = AcceptRequest(faulty_model, device, "faulty")

    def ended_soon(work: Any, *arguments: str, timeout_s: float) -> Any:
        """It would be given half a minute and more, and hangs for ever."""
        hangs = device == "hangs" and arguments[0] == "trees"
        return isolated(work, *arguments, timeout_s=4 if hangs else timeout_s)

    made = AcceptRun(
        request, 300, lambda what, fraction: None, lambda: None, ended_soon, checks=checks
    )
    made.run(faulty_runtime.FaultyRuntime().devices(RuntimeOptions()))
    rows = {row.check: row for row in made.rows}
    assert rows["target"].mark is Mark.PASSED
    assert rows["trees"].mark is Mark.FAILED and found in rows["trees"].found
    assert rows["nodes"].found.startswith("not told")  # which it says once it is open


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "in_processes"), [("faulty", False), ("ort", True), ("llamacpp", False)]
)
def test_the_command_as_it_is_run(
    runtime: str,
    in_processes: bool,
    faulty_model: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How far it comes depends on what else runs here; nothing that it finds is an error. Checks of
    two runtimes are made in this process: they have nothing to import, so that little time is as
    much as a minute in processes."""
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
    if not in_processes:
        inside = partial(AcceptRun, isolate=lambda work, *arguments, timeout_s: work(*arguments))
        monkeypatch.setattr(runner_module, "AcceptRun", inside)
    minutes = "1" if in_processes else "0.2"
    told = ["--runtime", runtime, "--minutes", minutes, "--out", str(tmp_path / "out"), "--json"]
    pair = ["--draft", faulty_model, "--draft-runtime", runtime]
    status = run(["accept", faulty_model, "--device", "cpu", *told, *pair])
    report = json.loads(capfd.readouterr().out)
    (data,) = (tmp_path / "out").glob("*.json")
    assert json.loads(data.read_text(encoding="ascii"))["rows"] == report["rows"]
    assert {row["check"] for row in report["rows"]} == {"devices", *BY_NAME}
    failed = [row for row in report["rows"] if row["mark"] == "failed"]
    for row in failed:  # a busy machine times wrong, and is taken for one that hangs
        timed = row["check"] in ("forecast", "passes") and row["name"] != "error"
        assert timed or row["found"].startswith("there was no answer within"), row
    assert status == (1 if failed else 0)
