"""Plans on a machine whose devices crash, hang, compute wrong, are full or slow: what goes wrong is
a line, and the best of the rest is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core import entry_points
from edge_spec.core.isolated import isolated
from edge_spec.placement import survey as survey_module
from edge_spec.scheduler import profile as profile_module
from edge_spec.text.prompt_files import Prompt
from fixtures import rig

pytestmark = pytest.mark.slow  # each place starts a process


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """machine("cpu,fast"): with no other devices, and little time to measure them."""
    prompts = [Prompt("1", "qa", "the rain in an inner"), Prompt("2", "qa", "then in the end")]

    def install(devices: str) -> None:
        rig.install(tmp_path, monkeypatch, devices)
        names = ["crashing", "rig"]
        others = entry_points.names
        monkeypatch.setattr(
            entry_points, "names", lambda kind: names if kind == "runtimes" else others(kind)
        )

    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(survey_module, "read_prompts", lambda path, per_category: prompts)
    monkeypatch.setattr(survey_module, "_MOST_S", 0.2)
    monkeypatch.setattr(survey_module, "_LEAST_S", 0.2)
    monkeypatch.setattr(profile_module, "MOST_SPREAD", 1e9)  # however busy the machine is
    return install


def impatient(work: Any, file: str, timeout_s: float, **more: Any) -> Any:
    """As `isolated`, which does not wait long for the device of which nothing will come."""
    hangs = r"\"name\": \"hangs\"" in Path(file).read_text(encoding="utf-8")
    return isolated(work, file, timeout_s=0.5 if hangs else timeout_s, **more)


def test_what_goes_wrong_is_a_line_and_the_best_of_the_rest_is_chosen(
    gguf: Callable[..., Path],
    machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine("cpu,wrong,fast,slow,aborts,hangs,full,lost,small")
    monkeypatch.setattr(survey_module, "isolated", impatient)
    assert run(["plan", str(gguf("llama")), "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    notes = dict(line.split(": ", 1) for line in plan["notes"])
    assert "SIGABRT" in notes["crashing"] and "SIGABRT" in notes["rig aborts"]
    assert notes["rig hangs"] == "there was no answer within 0.5 s"
    assert notes["rig full"] == "there was not enough memory"
    assert notes["rig lost"].startswith("the device was lost")
    assert notes["rig wrong"].startswith("it computes wrong: ")
    assert all(f"note: {line}" in err for line in plan["notes"])
    first, *others = plan["placements"]
    assert (first["target"]["device"], first["on_devices"]) == ("fast", {"rig fast0": rig.NEEDED})
    assert {each["target"]["device"] for each in others} == {"cpu", "slow", "small"}
    (small,) = [each for each in others if each["target"]["device"] == "small"]
    assert small["reason"] == "does not fit: 100 MB of 100 MB free on rig small0"
    assert "Measuring llama-F32 on rig fast" in err


def test_where_nothing_works_all_reasons_are_told(
    gguf: Callable[..., Path], machine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine("full,lost")
    assert run(["plan", str(gguf("llama")), "--json"]) == 1
    out, err = capsys.readouterr()
    told = err.splitlines()[-1]
    assert out == "" and "llama-F32 runs nowhere here: crashing: " in told
    assert "rig full: there was not enough memory; rig lost: the device was lost" in told


def test_what_failed_is_known_until_it_is_tried_again_and_no_profile_of_it_is_kept(
    gguf: Callable[..., Path],
    machine: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine("cpu,wrong,full")
    model = str(gguf("llama"))
    for _ in range(2):
        assert run(["plan", model]) == 0
    again = capsys.readouterr().err
    assert "rig full: there was not enough memory (--refresh tries it again)" in again
    kept = {each.key.device for each in profile_module.SECONDS.find() if each.key.identity}
    assert kept == {"cpu"}
    assert run(["plan", model, "--refresh"]) == 0
    assert "note: rig full: there was not enough memory\n" in capsys.readouterr().err


def test_a_draft_that_does_not_fit_beside_its_target_is_placed_on_another_device(
    gguf: Callable[..., Path],
    machine: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine("fast,twin")
    model, draft = str(gguf("llama")), str(gguf("llama", "F16"))  # the same weights
    assert run(["plan", model, "--draft", draft, "--json"]) == 0
    placements = json.loads(capsys.readouterr().out)["placements"]
    pairs = [each for each in placements if each["draft"]]
    best, together = (
        pairs[0],
        next(each for each in pairs if each["draft"]["device"] == each["target"]["device"]),
    )
    here, there = best["target"]["device"], best["draft"]["device"]
    assert here != there  # the fastest device has room for one of the two
    assert together["on_devices"] == {f"rig {here}0": 2 * rig.NEEDED}
    assert together["reason"] == f"does not fit: 160 MB of 100 MB free on rig {here}0"
    assert best["on_devices"] == {f"rig {here}0": rig.NEEDED, f"rig {there}0": rig.NEEDED}
