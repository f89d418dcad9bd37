"""Planning with real runtimes and tiny models, from the measurement to the options it leads to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.isolated import IsolatedError
from edge_spec.loader import load_engine
from edge_spec.models.devices import Device, list_devices, processor
from edge_spec.models.model_plan import prepare_model
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import idle_process
from edge_spec.placement import survey as survey_module
from edge_spec.placement.idle_process import SWITCH, measure_when_idle
from edge_spec.placement.plan import Placement
from edge_spec.placement.planner import Planner
from edge_spec.scheduler import profile as profile_module
from edge_spec.scheduler.profile import SECONDS, kept_profiles, profile_key
from edge_spec.text.prompt_files import Prompt
from fixtures.silence import quiet
from fixtures.trials import as_measured

PROMPTS = [
    Prompt("1", "conversation", "the rain in an inner"),
    Prompt("2", "qa", "then in the end"),
]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, two short prompts, and little time."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
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


def test_a_plan_ranks_every_runtime_and_tries_every_drafter_at_the_best(model: str) -> None:
    devices = list_devices()
    planner = Planner(Source(model, quiet), None, devices, quiet, as_measured)
    plan = planner.make()
    runtimes = {device.runtime for device in devices if device.fault is None}
    assert {each.target.runtime for each in plan.placements} == runtimes - {"reference"}
    tried = [each for each in plan.placements if each.speedup is not None]
    best = plan.placements[0]
    assert all(each.target == best.target for each in tried)
    drafters = {drafter for each in tried for drafter in each.drafter.split(",")}
    assert {"none", "suffix", "recycling", "lookahead", "jacobi"} <= drafters
    assert "answers" not in drafters  # it has none
    others = plan.placements[len(tried) :]
    least = min(each.loss for each in plan.placements if each.loss is not None)
    ranks = [((each.loss or 0) - least > 0.005, each.step_s or 0) for each in (best, *others)]
    assert ranks == sorted(ranks)
    assert best.reason == "" and all(each.reason for each in plan.placements[1:])
    assert all(each.memory_bytes for each in plan.placements)
    assert len(planner.notes) == sum(device.fault is not None for device in devices)


def test_a_plan_made_again_measures_no_passes(model: str, gguf: Any, measured: list[Any]) -> None:
    draft = Source(str(gguf("llama", "F16")), quiet)

    def planner(refresh: bool = False) -> Planner:
        return Planner(Source(model, quiet), draft, one_device(), quiet, as_measured, refresh)

    made = planner().make()
    num_places = len(measured)
    assert num_places and planner().make() == made
    assert len(measured) == num_places
    planner(refresh=True).make()
    assert len(measured) == 2 * num_places


def test_the_draft_is_planned_with_each_of_its_places(
    model: str, gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placement, "can_pay", True)  # whatever tiny models take
    draft = Source(str(gguf("llama", "F16")), quiet)
    plan = Planner(Source(model, quiet), draft, one_device(), quiet, as_measured).make()
    paired = [each for each in plan.placements if each.draft is not None]
    tried = {each.drafter for each in paired if each.speedup is not None}
    assert tried == {"suffix,cascade", "draft-model"}
    assert plan.placements[0].draft is not None  # it is twice as fast
    alone = next(each for each in plan.placements if each.draft is None)
    assert paired[0].memory_bytes > alone.memory_bytes  # type: ignore[operator]


def test_a_place_that_fails_in_the_trial_is_left_out_with_its_reason(model: str) -> None:
    failed: list[str] = []

    def trial(placements: Any, *more: Any) -> Any:
        if not failed:
            failed.append(str(placements[0]))
            raise IsolatedError("the device was lost")
        return as_measured(placements, *more)

    devices = [processor("ort"), processor("llamacpp")]
    pytest.importorskip("llama_cpp")
    planner = Planner(Source(model, quiet), None, devices, quiet, trial)
    plan = planner.make()
    assert planner.notes == [f"{failed[0]}: the device was lost"]
    assert failed[0] not in map(str, plan.placements)


def test_a_draft_that_fails_in_the_trial_is_left_out_and_its_target_is_tried_alone(
    model: str, gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placement, "can_pay", True)

    def trial(placements: Any, *more: Any) -> Any:
        if any(each.draft for each in placements):
            raise IsolatedError("the draft was lost")
        return as_measured(placements, *more)

    draft = Source(str(gguf("llama", "F16")), quiet)
    planner = Planner(Source(model, quiet), draft, one_device(), quiet, trial)
    best = planner.make().placements[0]
    assert best.draft is None and best.speedup is not None
    assert [line for line in planner.notes if line.endswith(": the draft was lost")]


def test_where_every_trial_fails_the_places_are_ranked(model: str) -> None:
    def trial(*given: Any) -> Any:
        raise IsolatedError("it was lost")

    planner = Planner(Source(model, quiet), None, one_device(), quiet, trial)
    plan = planner.make()
    assert plan.placements[0].step_s is not None


def test_what_was_tried_on_a_busy_machine_is_told(model: str) -> None:
    """Plain decoding has no reason to be much slower than its passes but other processes."""

    def slow(placements: Any, *more: Any) -> Any:
        found = as_measured(placements, *more)
        return {
            name: replace(each, tokens_per_s=each.tokens_per_s * 1e-12)  # type: ignore[type-var, union-attr]
            for name, each in found.items()
        }

    planner = Planner(Source(model, quiet), None, one_device(), quiet, slow)
    planner.make()
    assert "the machine was busy" in planner.notes[0]
    again = Planner(Source(model, quiet), None, one_device(), quiet, as_measured)
    again.make()
    assert not again.notes


def test_passes_that_took_far_longer_than_decoding_are_measured_again_by_the_next_plan(
    model: str, measured: list[Any]
) -> None:
    def fast(placements: Any, *more: Any) -> Any:
        found = as_measured(placements, *more)
        return {
            name: replace(each, tokens_per_s=each.tokens_per_s * 1e12)  # type: ignore[type-var, union-attr]
            for name, each in found.items()
        }

    for count in (1, 2):
        planner = Planner(Source(model, quiet), None, one_device(), quiet, fast)
        planner.make()
        assert len(measured) == count
        [note] = planner.notes
        assert "passes took" in note and "the machine was busy" in note
        assert not list(kept_profiles(Source(model, quiet)))


def test_the_engine_runs_as_the_plan_says(model: str) -> None:
    source = Source(model, quiet)
    pytest.importorskip("llama_cpp")
    devices = [processor("llamacpp")]
    plan = Planner(source, None, devices, quiet, as_measured).make()
    with load_engine(model, LoadOptions(), quiet) as engine:
        assert engine.parts.runtime == plan.placements[0].target.runtime
        assert engine.generate("the", max_tokens=3).stats.predicted_n == 3


@pytest.mark.slow  # converts and measures
def test_an_idle_model_is_measured_by_another_process(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How certain that is depends on the machine: what is kept is looked at, not what is said."""
    monkeypatch.setattr(idle_process, "is_idle", lambda: True)
    monkeypatch.setattr(idle_process, "QUIET_S", 0.0)
    source, options = Source(model, quiet), LoadOptions(runtime="ort")
    prepare_model(source, "ort", quiet)  # nothing is converted for it
    process = measure_when_idle(source, options, "ort")
    assert process is not None
    process.pause()  # the first answer
    assert not list(kept_profiles(source))
    process.resume()
    assert process.join(300)
    process.close()
    prepared = prepare_model(source, "ort", quiet)
    expected = profile_key(source, prepared, options.runtime_options)
    assert [each.key for each in SECONDS.find() if each.key.identity] == [expected]


@pytest.mark.slow  # the command of a busy machine runs by default
def test_the_command_prints_a_table_or_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--json"]) == 0
    assert list(kept_profiles(Source(model, quiet)))
    document = json.loads(capsys.readouterr().out)
    assert document["placements"][0]["target"]["runtime"] and document["in_force"]
    assert run(["plan", model]) == 0
    table = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["drafter", "tokens/s"] for line in table)
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
