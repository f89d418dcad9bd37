"""Planning with real runtimes and tiny models, from the measurement to the options it leads to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.loader import load_engine
from edge_spec.models.devices import Device, list_devices, processor
from edge_spec.models.model_plan import prepare_model
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import place_work as survey_module
from edge_spec.placement import planner as planner_module
from edge_spec.placement.idle_process import SWITCH, measure_when_idle
from edge_spec.placement.planner import Planner
from edge_spec.scheduler import profile as profile_module
from edge_spec.scheduler.plan_file import keep_plan, kept_plan
from edge_spec.scheduler.profile import kept_profiles, profile_key
from edge_spec.text.prompt_files import Prompt
from fixtures.silence import quiet
from fixtures.trials import as_forecast

PROMPTS = [
    Prompt("1", "conversation", "the rain in an inner"),
    Prompt("2", "qa", "then in the end"),
]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, two short prompts, and little time."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(planner_module, "read_prompts", lambda path, per_category: PROMPTS)
    monkeypatch.setattr(survey_module, "_MOST_S", 0.2)
    monkeypatch.setattr(survey_module, "_LEAST_S", 0.2)
    monkeypatch.setattr(profile_module, "MOST_SPREAD", 1e9)  # however busy the machine is


@pytest.fixture
def model(gguf: Callable[..., Path]) -> str:
    return str(gguf("llama"))


def one_device() -> list[Device]:
    return [processor("ort")]


def test_a_plan_ranks_every_runtime_and_drafter(model: str, tmp_path: Path) -> None:
    devices = list_devices()
    planner = Planner(Source(model, quiet), None, devices, quiet, as_forecast)
    plan = planner.make()
    runtimes = {device.runtime for device in devices if device.fault is None}
    assert {each.target.runtime for each in plan.placements} == runtimes - {"reference"}
    drafters = {each.drafter for each in plan.placements}
    assert {"none", "suffix", "recycling", "lookahead", "jacobi", "answers"} <= drafters
    least = min(each.loss for each in plan.placements if each.loss is not None)
    ranks = [
        (each.drafter != "answers", (each.loss or 0) - least <= 0.005, each.tokens_per_s)
        for each in plan.placements
    ]
    # What drafts without a plan comes first where it is within a tenth of the fastest, as times of
    # this machine may have it.
    usual = {"suffix", "suffix,recycling"}
    first, fastest = plan.placements[0], max(ranks)
    assert ranks[1:] == sorted(ranks[1:], reverse=True)
    assert ranks[0] == fastest or (
        first.drafter in usual and ranks[0][:2] == fastest[:2] and 1.1 * ranks[0][2] > fastest[2]
    )
    assert first.reason == "" and all(each.reason for each in plan.placements[1:])
    assert all(each.memory_bytes for each in plan.placements)
    assert len(planner.notes) == sum(device.fault is not None for device in devices)


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"library": "0.1"}, False),
        ({"kernels": "of before"}, False),
        ({"runtime": "gone"}, False),
    ],
)
def test_a_plan_holds_until_a_place_its_library_or_its_kernels_change(
    change: dict[str, str], holds: bool, model: str
) -> None:
    source = Source(model, quiet)
    plan = Planner(source, None, one_device(), quiet, as_forecast).make()
    plan = replace(plan, places=tuple(replace(each, **change) for each in plan.places))
    planner = Planner(source, None, one_device(), quiet, as_forecast)
    assert planner.still_holds(plan) is holds
    assert not planner.still_holds(replace(plan, made_by="0.0.1"))
    two = [*one_device(), replace(processor("ort"), name="other")]
    assert not Planner(source, None, two, quiet, as_forecast).still_holds(plan)


def test_a_draft_is_planned_with_each_place_of_both(model: str, gguf: Any) -> None:
    # The same weights: all its draft tokens are right.
    draft = Source(str(gguf("llama", "F16")), quiet)
    plan = Planner(Source(model, quiet), draft, one_device(), quiet, as_forecast).make()
    paired = [each for each in plan.placements if each.draft is not None]
    assert paired and all(each.drafter == "draft-model" for each in paired)
    assert all(each.acceptance == 1.0 for each in paired)
    alone = next(each for each in plan.placements if each.draft is None)
    assert paired[0].memory_bytes > alone.memory_bytes  # type: ignore[operator]


def test_a_draft_with_other_tokens_is_left_out_and_said(
    model: str, hf: Callable[..., Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    copytree(hf("llama"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    planner = Planner(
        Source(model, quiet), Source(str(other), quiet), one_device(), quiet, as_forecast
    )
    assert all(each.draft is None for each in planner.make().placements)
    assert planner.notes == ["draft: other has other tokens: there is no forecast"]


def test_the_engine_runs_as_the_plan_says(model: str) -> None:
    source = Source(model, quiet)
    pytest.importorskip("llama_cpp")
    devices = [processor("llamacpp")]
    plan = Planner(source, None, devices, quiet, as_forecast).make()
    keep_plan(plan)
    with load_engine(model, LoadOptions(), quiet) as engine:
        assert engine.parts.runtime == plan.placements[0].target.runtime
        assert engine.generate("the", max_tokens=3).stats.predicted_n == 3


@pytest.mark.slow  # converts and measures
def test_an_idle_model_is_measured_by_another_process(model: str, tmp_path: Path) -> None:
    """How certain that is depends on the machine: what is kept is looked at, not what is said."""
    source, options = Source(model, quiet), LoadOptions(runtime="ort")
    prepare_model(source, "ort", quiet)  # nothing is converted for it
    process = measure_when_idle(source, options, "ort", lambda: True, quiet_s=0.0)
    assert process is not None
    process.pause()  # the first answer
    assert not list(profile_module._PROFILE.find())
    process.resume()
    assert process.join(300)
    process.close()
    prepared = prepare_model(source, "ort", quiet)
    expected = profile_key(source, prepared, options.runtime_options)
    assert [each.key for each in profile_module._PROFILE.find()] == [expected]


@pytest.mark.slow  # the command of a busy machine runs by default
def test_the_command_prints_a_table_or_json_and_writes_the_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    profiles = tmp_path / "profiles"
    assert run(["plan", model, "--json", "--out", str(out), "--profiles", str(profiles)]) == 0
    keys = [key for key, _ in kept_profiles(Source(model, quiet))]
    assert {path.name for path in profiles.iterdir()} == {key.file_name for key in keys} != set()
    document = json.loads(capsys.readouterr().out)
    written = json.loads(out.read_text())
    assert len(written.pop("sha256")) == 64 and document == written
    assert run(["plan", model]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["target", "weights"] and table[-1].startswith("best: ")
    best = document["placements"][0]["target"]["runtime"]
    other = "ort" if best != "ort" else "reference"
    refused = ["generate", model, "the", "--plan", str(out), "--runtime", other]
    assert run(refused) == 2
    assert "--runtime contradicts the plan" in capsys.readouterr().err
    assert run(["generate", model, "the", "--plan", str(out), "--raw", "--max-tokens", "2"]) == 0


def test_a_plan_of_a_busy_machine_is_shown_and_written_but_not_kept(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_module, "MOST_SPREAD", -1.0)
    monkeypatch.setattr("edge_spec.models.devices.list_devices", one_device)
    out = tmp_path / "plan.json"
    assert run(["plan", model, "--out", str(out)]) == 0
    notes = capsys.readouterr().err
    assert "the machine was busy" in notes and "this plan is not kept" in notes
    assert out.exists() and kept_plan(Source(model, quiet), None) is None
