"""`edge-spec accept`: each check finds the fault that it is for, and passes a device without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.isolated import isolated
from edge_spec.diagnostics.accept import conformance, lossless, memory, passes, soak
from edge_spec.diagnostics.accept.checks import run_check
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, Mark
from fixtures import faulty_runtime

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("faulty")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "CONTEXT_TOKENS", 96)
    monkeypatch.setattr(conformance, "_PROMPTS", (12, 80))
    monkeypatch.setattr(memory, "_TOKENS", 128)


@pytest.fixture
def check(faulty_model: str) -> Callable[..., dict[str, CheckRow]]:
    """check(name, device, seconds=...): what the process of a check finds, by row."""

    def found(name: str, device: str, seconds: float = 60, **more: Any) -> dict[str, CheckRow]:
        request = AcceptRequest(faulty_model, device, "faulty", **more)
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


def test_a_forecast_that_is_too_low_by_half_is_found(faulty_model: str) -> None:
    """In processes of their own: this one may return other tests' memory meanwhile."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is not known")

    def found(device: str) -> CheckRow:
        request = AcceptRequest(faulty_model, device, "faulty").to_json()
        rows = map(CheckRow.from_dict, isolated(run_check, "memory", request, "60", timeout_s=300))
        return next(row for row in rows if row.name == "forecast and real")

    row = found("forgets")
    assert row.mark is Mark.FAILED
    assert row.numbers["resident_bytes"] >= faulty_runtime.TAKEN_BYTES
    assert found("placed").mark is Mark.PASSED


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
    """Other tests of this process leave memory that comes and goes: only the device's counts."""
    for name, value in (("_MAX_TOKENS", 8), ("_PROMPT_TOKENS", 64), ("_LEAST_ROUNDS", 5)):
        monkeypatch.setattr(soak, name, value)
    monkeypatch.setattr(soak, "resident_bytes", faulty_runtime.kept_bytes)
    found = check("soak", device, seconds=0)  # everything twice
    failed = [name for name, each in found.items() if each.mark is Mark.FAILED]
    assert failed == ([] if row is None else [row])


def test_overlap_that_changes_texts_is_found(faulty_model: str, check: Any) -> None:
    pair = {"draft": faulty_model, "draft_runtime": "faulty"}
    found = check("overlap", "crossed", seconds=0, draft_device="crossed", **pair)
    del found["rate"]  # whether a round finds tokens that were drafted ahead depends on the time
    assert marks(found) == {
        "texts with overlap off": "passed",
        "texts with overlap on": "failed",
    }
