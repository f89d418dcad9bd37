"""Planning with real runtimes and tiny models, from the measurement to the options it leads to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.loader import load_engine
from edge_spec.models.devices import Device, list_devices, processor
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import survey as survey_module
from edge_spec.placement.plan import Plan, make_plan
from edge_spec.scheduler import profile as profile_module
from edge_spec.scheduler.profile import kept_profiles
from edge_spec.text.prompt_files import Prompt
from fixtures.silence import quiet

PROMPTS = [
    Prompt("1", "conversation", "the rain in an inner"),
    Prompt("2", "qa", "then in the end"),
]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, two short prompts, and little time."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(survey_module, "read_prompts", lambda path, per_category: PROMPTS)
    monkeypatch.setattr(survey_module, "_MOST_S", 0.2)
    monkeypatch.setattr(survey_module, "_LEAST_S", 0.2)
    monkeypatch.setattr(profile_module, "MOST_SPREAD", 1e9)  # however busy the machine is


@pytest.fixture
def model(gguf: Callable[..., Path]) -> str:
    return str(gguf("llama"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The places that were measured, one after the other."""
    found: list[Any] = []
    measure = survey_module.measure_place

    def counted(*given: Any) -> Any:
        found.append(given)
        return measure(*given)

    monkeypatch.setattr(survey_module, "measure_place", counted)
    return found


def one_device() -> list[Device]:
    return [processor("ort")]


def test_a_plan_ranks_every_runtime(model: str) -> None:
    devices = list_devices()
    plan = make_plan(Source(model, quiet), None, devices, quiet)
    runtimes = {device.runtime for device in devices if device.fault is None}
    for_checks = {"reference", "coreai"} if sys.platform == "linux" else {"reference"}
    assert {each.target.runtime for each in plan.placements} == runtimes - for_checks
    least = min(each.loss for each in plan.placements if each.loss is not None)
    ranks = [((each.loss or 0) - least > 0.005, each.step_s or 0) for each in plan.placements]
    assert ranks == sorted(ranks)
    best, *others = plan.placements
    assert best.reason == "" and all(each.reason for each in others)
    assert all(each.memory_bytes for each in plan.placements)
    assert len(plan.notes) == sum(device.fault is not None for device in devices)


def test_a_plan_made_again_measures_no_passes(model: str, gguf: Any, measured: list[Any]) -> None:
    draft = Source(str(gguf("llama", "F16")), quiet)

    def made(refresh: bool = False) -> Plan:
        return make_plan(Source(model, quiet), draft, one_device(), quiet, refresh)

    first, num_places = made(), len(measured)
    assert num_places and made() == first
    assert len(measured) == num_places
    made(refresh=True)
    assert len(measured) == 2 * num_places


def test_the_draft_is_planned_with_each_of_its_places(model: str, gguf: Any) -> None:
    draft = Source(str(gguf("llama", "F16")), quiet)
    plan = make_plan(Source(model, quiet), draft, one_device(), quiet)
    paired = [each for each in plan.placements if each.draft is not None]
    assert {each.target for each in paired} == {plan.placements[0].target}
    assert all(each.pair_step_s for each in paired)
    assert paired[0].memory_bytes > plan.placements[0].memory_bytes  # type: ignore[operator]


def test_the_engine_runs_as_the_plan_says(model: str) -> None:
    source = Source(model, quiet)
    pytest.importorskip("llama_cpp")
    devices = [processor("llamacpp")]
    plan = make_plan(source, None, devices, quiet)
    with load_engine(model, LoadOptions(), quiet) as engine:
        assert engine.parts.runtime == plan.placements[0].target.runtime
        assert engine.generate("the", max_tokens=3).stats.predicted_n == 3


@pytest.mark.slow  # the command of a busy machine runs by default
def test_the_command_prints_a_table_or_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--json"]) == 0
    assert list(kept_profiles(Source(model, quiet)))
    document = json.loads(capsys.readouterr().out)
    assert document["placements"][0]["target"]["runtime"] and document["in_force"]
    assert run(["plan", model]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["place", "weights"] and any(
        line.startswith("engine: ") for line in table
    )


def test_a_plan_of_a_busy_machine_is_shown_but_not_kept(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "MOST_SPREAD", -1.0)
    monkeypatch.setattr("edge_spec.models.devices.list_devices", one_device)
    assert run(["plan", model]) == 0
    notes = capsys.readouterr().err
    assert "the machine was busy" in notes
    assert not list(kept_profiles(Source(model, quiet)))
