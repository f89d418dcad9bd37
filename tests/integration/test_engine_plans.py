"""One plan: what `doctor` says, what an engine says of itself and what a command prints is the same
on every machine and state of the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.errors import DeviceError
from edge_spec.loader import load_asked, load_engine
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.devices import Device
from edge_spec.models.model_plan import ModelPlan, PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.runtimes.llamacpp import LlamaCppRuntime
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.scheduler.engine_plan import choose_plan, plan_engine, plans_for
from edge_spec.scheduler.priors import LIBRARY_KERNELS
from edge_spec.scheduler.profile import Profile, profile_key, save_profile
from edge_spec.storage.measurements import DIRECTORY, FILE
from fixtures.silence import quiet

pytest.importorskip("onnxruntime")
pytest.importorskip("llama_cpp")

CHEAP = {1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2}
DEAR = {1: 1.0, 2: 1.9, 4: 3.2, 8: 5.5}


@dataclass(frozen=True)
class Machine:
    """asked: options. times: of a token with a runtime, in ms, "NAME" as it is opened unasked or
    "NAME THREADS" as `edge-spec plan` measures it, with 0 for its own choice. rows: how they cost.
    converted: whether the model is there for ort. store: what its file holds instead. runs: what
    the plan is to name."""

    runs: str
    drafts: str
    asked: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=lambda: CHEAP)
    converted: bool = False
    installed: tuple[str, ...] = ("llamacpp", "ort")
    store: bytes | None = None
    says: str = ""


READS = "llamacpp (it reads the file as it is"
MACHINES = {
    "nothing is known": Machine(READS, "suffix"),
    "one runtime is known": Machine(READS, "suffix,recycling", times={"llamacpp": 30}),
    "its rows are dear": Machine(READS, "suffix", times={"llamacpp": 30}, rows=DEAR),
    "its steps are short": Machine(READS, "suffix", times={"llamacpp": 0.3}),
    "another one is faster, and converted": Machine(
        "ort (the model is converted for it already and a token takes",
        *("suffix,recycling", {}, {"llamacpp": 30, "ort": 20}),
        converted=True,
    ),
    "another one is hardly faster": Machine(
        READS, "suffix,recycling", times={"llamacpp": 30, "ort": 29}, converted=True
    ),
    "only a conversion was measured": Machine(READS, "suffix", times={"ort": 20}, converted=True),
    "a plan has measured only a conversion": Machine(
        READS, "suffix", times={"ort 0": 20}, converted=True
    ),
    "a plan has measured it": Machine(
        "llamacpp on cpu (it reads", "suffix,recycling", times={"llamacpp 0": 30}
    ),
    "fewer threads are faster": Machine(
        "llamacpp on cpu, 1 thread (it reads the file as it is",
        "suffix,recycling",
        times={"llamacpp 1": 20},
    ),
    "fewer threads are no faster": Machine(
        READS, "suffix,recycling", times={"llamacpp": 20, "llamacpp 1": 19.9}
    ),
    "threads are named": Machine(
        "llamacpp, 1 thread (", "suffix", {"threads": 1}, {"llamacpp 2": 20}
    ),
    "a runtime is named": Machine(
        "ort", "suffix", {"runtime": "ort"}, {"llamacpp": 20}, converted=True
    ),
    "a drafter is named": Machine(READS, "lookahead", {"drafter": "lookahead"}, {"llamacpp": 30}),
    "no drafter is wanted": Machine(
        READS, "none", {"drafter": "none"}, says="--drafter none turns off"
    ),
    "a draft is named": Machine(
        READS,
        "suffix,cascade",
        {"draft": "DRAFT"},
        {"llamacpp": 30},
        says="with the draft draft on",
    ),
    "a draft and a drafter are named": Machine(
        READS, "draft-model", {"draft": "DRAFT", "drafter": "draft-model"}
    ),
    "a draft is named where another runtime is faster": Machine(
        "ort (", "suffix,cascade", {"draft": "DRAFT"}, {"llamacpp": 30, "ort": 10}, converted=True
    ),
    "one runtime is installed": Machine(
        "ort (", "suffix", installed=("ort",), converted=True, says="is not installed"
    ),
    "the store is half written": Machine(READS, "suffix", store=b"SQLite format 3\0" + b"\1" * 40),
    "the store is another file": Machine(READS, "suffix", store=b"no database at all"),
    "the store is empty": Machine(READS, "suffix", store=b""),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    # What is usual of rows depends on the processor.
    name = "edge_spec.scheduler.row_findings.row_shares"
    monkeypatch.setattr(name, lambda kernels, device: LIBRARY_KERNELS)
    return tmp_path / "cache"


@pytest.fixture
def model(gguf: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "target.gguf"
    path.write_bytes(gguf().read_bytes())
    return path


def profile(step_s: float, rows: dict[int, float]) -> Profile:
    costs = {width: step_s * times for width, times in rows.items()}
    return Profile(costs, rounds=5, spread=0.0)


def keep(source: Source, place: str, step_ms: float, rows: dict[int, float]) -> None:
    name, _, threads = place.partition(" ")
    how = RuntimeOptions()
    if threads:
        how = RuntimeOptions(threads=int(threads) or None, providers=("cpu",))
    plan = ModelPlan(source, name, how)
    prepared = plan.find()
    assert prepared is not None
    save_profile(profile_key(source, prepared), profile(step_ms / 1e3, rows))


@pytest.mark.parametrize("case", MACHINES.values(), ids=MACHINES)
def test_a_plan_is_the_same_everywhere(
    case: Machine,
    model: Path,
    cache: Path,
    gguf: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtimes, "installed_runtimes", lambda: list(case.installed))
    source = Source(str(model), quiet)
    if case.converted:
        ModelPlan(source, "ort").prepare(quiet)
    for place, step_ms in case.times.items():
        keep(source, place, step_ms, case.rows)
    if case.store is not None:
        (cache / DIRECTORY).mkdir(parents=True, exist_ok=True)
        (cache / DIRECTORY / FILE).write_bytes(case.store)
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(gguf().read_bytes())
    given = {name: str(draft) if value == "DRAFT" else value for name, value in case.asked.items()}
    asked = AskedOptions(**given)

    plan, _ = choose_plan(plans_for(Source(str(model), quiet), asked))
    lines = plan.explain()
    assert lines[0].startswith(f"engine: {case.runs}")
    assert plan.drafter == case.drafts
    assert lines[1].startswith(f"drafter: {case.drafts.replace(',', ', ')}")
    assert case.says in " ".join(lines) and len(lines) <= 3

    with load_asked(str(model), asked, quiet) as engine:
        assert engine.plan == lines
        names = {each.name for each in engine.parts.speculation.drafters}
        assert bool(names) == (case.drafts != "none")
    devices = [Device("llamacpp", "cpu", "cpu", "the processor")]
    report = diagnose(str(model), asked, quiet, devices=lambda: devices)
    assert tuple(report.examined["plan"]) == lines


@pytest.mark.parametrize("draft", [False, True])
def test_every_command_names_the_same_plan(
    draft: bool,
    model: Path,
    cache: Path,
    gguf: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "draft.gguf"
    other.write_bytes(gguf().read_bytes())
    asked = AskedOptions(draft=str(other) if draft else "none")
    lines = list(choose_plan(plans_for(Source(str(model), quiet), asked))[0].explain())
    options = ["--draft", asked.draft, "--explain", "--max-tokens", "4"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "code", "prompt": "hello there"}\n')
    for command in (
        ["generate", str(model), "hello", *options],
        ["bench", str(model), *options, "--prompts", str(prompts), "--json"],
        ["verify", str(model), *options, "--prompts", str(prompts), "--draws", "0"],
    ):
        shutil.rmtree(cache, ignore_errors=True)  # what one has measured changes the next plan
        run(command)
        told = capfd.readouterr().err.splitlines()
        assert [line for line in told if line in lines] == lines, command


def test_a_runtime_that_was_measured_alone_does_not_come_before_the_usual_one(
    hf: Callable[..., Path],
) -> None:
    """Of a checkpoint that is converted for both."""
    source = Source(str(hf()), quiet)
    for name in ("llamacpp", "ort"):
        ModelPlan(source, name).prepare(quiet)
    keep(source, "ort", 20, CHEAP)
    assert [each.target.name for each in plan_engine(source, LoadOptions())] == ["llamacpp", "ort"]
    keep(source, "llamacpp", 30, CHEAP)
    assert [each.target.name for each in plan_engine(source, LoadOptions())] == ["ort", "llamacpp"]


def test_a_device_that_is_gone_is_one_line_and_the_next_way_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A place that `edge-spec plan` has measured, and that is not there any more."""
    source = Source(str(model), quiet)
    keep(source, "llamacpp", 30, CHEAP)
    how = RuntimeOptions(providers=("cuda7",))
    prepared = ModelPlan(source, "llamacpp", how).find()
    assert prepared is not None
    save_profile(profile_key(source, prepared), profile(0.001, CHEAP))
    plans = plan_engine(source, LoadOptions())
    assert [each.target.how.providers for each in plans[:2]] == [("cuda7",), ()]
    with load_engine(str(model), LoadOptions(), quiet) as engine:
        assert engine.generate([5, 6, 7], max_tokens=2).tokens
        assert "cuda7" not in engine.plan[0].partition(", since")[0]
    assert len([line for line in caplog.messages if "cannot run" in line]) == 1


def test_a_draft_runs_where_it_was_measured_to_be_fastest(
    model: Path, gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(gguf("llama", "Q8_0").read_bytes())
    keep(Source(str(draft), quiet), "llamacpp 1", 1, CHEAP)
    threads, open_model = [], PreparedModel.open

    def opened(self: PreparedModel) -> Model:
        threads.append((self.name, self.how.threads))
        return open_model(self)

    monkeypatch.setattr(PreparedModel, "open", opened)
    with load_engine(str(model), LoadOptions(draft=(str(draft),)), quiet):
        assert sorted(threads) == [("draft", 1), ("target", None)]


def test_a_runtime_that_fails_is_named_in_the_plan_in_force(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: LlamaCppRuntime, *given: Any) -> None:
        raise DeviceError("llama.cpp has lost a device", remedy="Start again.")

    monkeypatch.setattr(LlamaCppRuntime, "open", lost)
    with load_engine(str(model), LoadOptions(), quiet) as engine:
        assert engine.plan[0] == (
            "engine: ort, since llamacpp cannot run it (llama.cpp has lost a device)"
        )
    monkeypatch.setattr(OrtRuntime, "open", lost)
    with pytest.raises(DeviceError, match="lost a device"):
        load_engine(str(model), LoadOptions(), quiet)


@pytest.mark.usefixtures("two_devices")
def test_what_the_command_plan_has_measured_is_what_a_start_goes_by(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.scheduler.profile.MOST_SPREAD", 1e9)  # however busy it is here
    monkeypatch.setattr("edge_spec.placement.survey._MOST_S", 0.2)
    asked = AskedOptions(draft="none")
    assert not choose_plan(plans_for(Source(str(model), quiet), asked))[0].costs.is_scaled
    run(["plan", str(model)])
    lines = capfd.readouterr().out.splitlines()
    plan, _ = choose_plan(plans_for(Source(str(model), quiet), asked))
    assert plan.costs.is_scaled and list(plan.explain()) == lines[-3:]
    with load_asked(str(model), asked, quiet) as engine:
        assert "verifying" in engine.parts.speculation.policy.beliefs()  # before any pass


def test_a_bundle_runs_where_it_was_measured_too(model: Path) -> None:
    converted = ModelPlan(Source(str(model), quiet), "ort")
    converted.prepare(quiet)
    bundle = Source(str(converted.kept), quiet)
    keep(bundle, "ort 0", 20, CHEAP)
    assert plan_engine(bundle, LoadOptions())[0].costs.at(1) == pytest.approx(0.02)
    keep(bundle, "ort 1", 10, CHEAP)
    [first, *_] = plan_engine(bundle, LoadOptions())
    assert first.target.how.threads == 1 and first.costs.at(1) == pytest.approx(0.01)
    assert plan_engine(bundle, LoadOptions(threads=2))[0].target.how.threads == 2


def test_no_plan_is_made_by_measuring(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: Any) -> None:
        raise AssertionError("a plan opens nothing")

    for runtime in (LlamaCppRuntime, OrtRuntime):
        monkeypatch.setattr(runtime, "open", opened)
    assert len(plan_engine(Source(str(model), quiet), LoadOptions())) == 2
