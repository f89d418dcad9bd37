"""`edge-spec accept`: each check finds the fault that it is for, and passes a device without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edge_spec.cli.main import run
from edge_spec.core.model import RuntimeOptions
from edge_spec.diagnostics.accept import conformance, lossless, passes, soak
from edge_spec.diagnostics.accept import runner as runner_module
from edge_spec.diagnostics.accept.checks import BY_NAME, CHECKS, run_check
from edge_spec.diagnostics.accept.report import html_page, print_report
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, Mark, passed
from edge_spec.diagnostics.accept.runner import AcceptRun
from edge_spec.placement.isolated import IsolatedError
from fixtures import faulty_runtime
from fixtures.tiny_models import build, write_gguf

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = build(max_position_embeddings=512)
    return str(write_gguf(tiny, tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty runtime, here and in processes that are started; and a cache of its own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    faulty_runtime.install(packages)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{ROOT}")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conformance, "CONTEXT_TOKENS", 96)
    monkeypatch.setattr(conformance, "_PROMPTS", (12, 80))


@pytest.fixture
def check(model: str) -> Callable[..., dict[str, CheckRow]]:
    """check(name, device, seconds=...): what the process of a check finds, by row."""

    def found(name: str, device: str, seconds: float = 60, **more: Any) -> dict[str, CheckRow]:
        request = AcceptRequest(model, device, "faulty", **more)
        rows = run_check(name, request.to_json(), str(seconds))
        again = json.loads(json.dumps(rows))  # as they come from another process
        return {row["name"]: CheckRow.from_dict(row) for row in again}

    return found


def marks(rows: dict[str, CheckRow]) -> dict[str, str]:
    return {name: str(row.mark) for name, row in rows.items()}


@pytest.mark.parametrize("name", ["target", "chains", "trees"])
def test_a_device_without_a_fault_passes(name: str, check: Any) -> None:
    rows = check(name, "placed")
    assert set(marks(rows).values()) == {"passed"}, rows


@pytest.mark.parametrize(
    ("device", "chains", "trees"),
    [
        ("wrong-trees", "passed", "failed"),
        ("wrong-chains", "failed", "passed"),
        ("no-numbers", "failed", "failed"),
        ("chains-only", "passed", "not measured"),
    ],
)
def test_chains_and_trees_are_judged_apart(
    device: str, chains: str, trees: str, check: Any
) -> None:
    assert marks(check("chains", device))["promises"] == chains
    assert marks(check("trees", device))["promises"] == trees


@pytest.mark.parametrize("device", ["wrong-far", "overflows"])
def test_a_fault_of_long_texts_alone_is_found(device: str, check: Any) -> None:
    found = marks(check("chains", device))
    long = f"after {conformance._PROMPTS[1]} tokens"
    assert found["after 12 tokens"] in ("passed", "not measured") and found[long] == "failed"


def test_a_whole_device_that_is_wrong_alike_is_found(check: Any) -> None:
    """It keeps all promises that can be held against itself."""
    rows = check("trees", "wrong-trees")
    assert rows["after 12 tokens"].mark is Mark.FAILED
    assert rows["after 12 tokens"].numbers["of_deviation"] > conformance.TOLERANCE
    assert rows["after 12 tokens"].numbers["against"] == "faulty on the CPU"


def test_the_real_load_error_is_the_reason(check: Any) -> None:
    (row,) = check("target", "refuses").values()
    assert row.mark is Mark.FAILED and row.found == "cannot load libfault.so.13"
    assert row.numbers == {"kind": "DeviceError", "remedy": "Install it."}


def test_heavy_operators_on_the_cpu_are_a_fault(check: Any) -> None:
    assert marks(check("nodes", "placed")) == {"by provider": "passed"}
    (row,) = check("nodes", "left-on-cpu").values()
    assert row.mark is Mark.FAILED and "15 MatMulNBits, 3 GroupQueryAttention" in row.found
    assert marks(check("nodes", "leaks")) == {"by provider": "not measured"}


def test_texts_that_drafting_changes_are_found(check: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lossless, "_MOST_PROMPTS", 2)
    monkeypatch.setattr(lossless, "_MOST_DRAWS", 0)
    found = check("verify", "wide-differs")
    assert found["greedy text"].mark is Mark.FAILED
    written = [each for row in found.values() for each in row.numbers.get("differing", ())]
    assert written and not any({"expected", "got"} & set(each) for each in written)
    assert marks(check("verify", "placed"))["greedy text"] == "passed"


def test_a_forecast_that_is_too_low_by_half_is_found(check: Any) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is not known")
    row = check("memory", "forgets")["forecast and real"]
    assert row.mark is Mark.FAILED
    assert row.numbers["resident_bytes"] >= faulty_runtime.TAKEN_BYTES
    assert marks(check("memory", "placed"))["forecast and real"] == "passed"


def test_passes_are_timed_at_each_context_that_fits(check: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(passes, "WIDTHS", (1, 2, 8))
    monkeypatch.setattr(passes, "Effort", partial(passes.Effort, max_rounds=2))
    rows = check("passes", "placed", seconds=600)
    timed = {name: row for name, row in rows.items() if name.startswith("t(k)")}
    contexts = [row.numbers["context_tokens"] for row in timed.values()]
    assert contexts == [32, 512 - 8]
    assert all(set(row.numbers["pass_ms"]) == {"1", "2", "8"} for row in timed.values())
    assert rows["prompt, commit, copy"].numbers["prompt_tokens_per_s"] > 0


@pytest.mark.parametrize(("device", "mark"), [("small", "passed"), ("small-untold", "failed")])
def test_too_little_memory_has_to_be_told_as_that(device: str, mark: str, check: Any) -> None:
    (row,) = check("out of memory", device).values()
    assert (row.mark, "small has too little memory" in row.found) == (mark, mark == "passed")


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("wavers", "repeated answers"),
        ("leaks", "resident memory"),
        ("raises", "errors"),
        ("placed", None),
    ],
)
def test_soak_finds_what_shows_in_time_only(
    device: str, row: str | None, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_MAX_TOKENS", 8), ("_PROMPT_TOKENS", 64), ("_LEAST_ROUNDS", 5)):
        monkeypatch.setattr(soak, name, value)
    found = check("soak", device, seconds=0)  # everything twice
    failed = [name for name, each in found.items() if each.mark is Mark.FAILED]
    if row == "resident memory" and not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is not known")
    assert failed == ([] if row is None else [row])


def test_overlap_that_changes_texts_is_found(model: str, check: Any) -> None:
    pair = {"draft": model, "draft_runtime": "faulty"}
    found = check("overlap", "crossed", seconds=0, draft_device="crossed", **pair)
    del found["rate"]  # whether a round finds tokens that were drafted ahead depends on the time
    assert marks(found) == {
        "texts with overlap off": "passed",
        "texts with overlap on": "failed",
    }


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
def command(model: str, tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[..., Any]]:
    """command(device, isolate): the exit status and what was written."""
    listed = faulty_runtime.FaultyRuntime().devices(RuntimeOptions())
    monkeypatch.setattr("edge_spec.placement.devices.list_devices", lambda: listed)

    def accept(device: str, isolate: Inline, *told: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(runner_module, "AcceptRun", partial(AcceptRun, isolate=isolate))
        out = tmp_path / "out"
        status = run(["accept", model, "--device", device, "--out", str(out), *told])
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


def test_the_report_is_written_after_each_check(model: str) -> None:
    """The next one may take the machine down."""
    written: list[int] = []
    request = AcceptRequest(model, "cpu", "faulty")
    made = AcceptRun(request, 60, lambda what, fraction: None, lambda: None, isolate=Inline())
    made.on_rows = lambda: written.append(len(made.rows))
    made.run(faulty_runtime.FaultyRuntime().devices(None))  # type: ignore[arg-type]
    assert len(written) == 1 + len(CHECKS) and written == sorted(written) and written[0]


def test_nothing_of_the_users_own_is_in_it(
    command: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jo.doe"))
    told = f"cannot open {tmp_path}/private/weights.bin, /home/jo.doe/x.gguf; {model}: jo.doe"
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
def test_bad_usage_is_one_line(model: str, told: list[str], fault: str, capsys: Any) -> None:
    told = [each.format(model=model) for each in told]
    assert run(["accept", model, "--device", "cpu", *told]) == 2
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
    device: str, found: str, model: str
) -> None:
    """For real, in processes of their own."""
    checks = [BY_NAME[name] for name in ("target", "trees", "nodes")]
    request = AcceptRequest(model, device, "faulty")
    made = AcceptRun(request, 60, lambda what, fraction: None, lambda: None, checks=checks)
    made.run(faulty_runtime.FaultyRuntime().devices(RuntimeOptions()))
    rows = {row.check: row for row in made.rows}
    assert rows["target"].mark is Mark.PASSED
    assert rows["trees"].mark is Mark.FAILED and found in rows["trees"].found
    assert rows["nodes"].found.startswith("not told")  # which it says once it is open


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["faulty", "ort", "llamacpp"])
def test_the_command_as_it_is_run(
    runtime: str, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """How far it comes depends on what else runs here; nothing that it finds is an error."""
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
    told = ["--runtime", runtime, "--minutes", "1", "--out", str(tmp_path / "out"), "--json"]
    pair = ["--draft", model, "--draft-runtime", runtime]
    status = run(["accept", model, "--device", "cpu", *told, *pair])
    report = json.loads(capfd.readouterr().out)
    (data,) = (tmp_path / "out").glob("*.json")
    assert json.loads(data.read_text(encoding="ascii"))["rows"] == report["rows"]
    assert {row["check"] for row in report["rows"]} == {"devices", *BY_NAME}
    failed = [row for row in report["rows"] if row["mark"] == "failed"]
    for row in failed:  # a busy machine times wrong, and is taken for one that hangs
        timed = row["check"] in ("forecast", "passes") and row["name"] != "error"
        assert timed or row["found"].startswith("there was no answer within"), row
    assert status == (1 if failed else 0)
