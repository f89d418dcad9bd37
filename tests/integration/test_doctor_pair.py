"""`edge-spec doctor` examines the machine, and says whether a pair will work here and pay before
anything is loaded. It changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.cli.output import table_lines
from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.diagnostics.doctor.engine import break_even
from edge_spec.diagnostics.doctor.report import Finding, Report, Severity, document
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import Bundle, read_manifest
from edge_spec.models.devices import Device, Memory
from edge_spec.models.source import Source
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.engine_plan import choose_plan, plans_for
from edge_spec.scheduler.profile import Profile, profile_key, save_profile
from fixtures.manifests import rewrite
from fixtures.silence import quiet

CPU = Device("ort", "cpu", "cpu", "the processor")
NOWHERE = "nowhere"  # no model, so that only the machine is looked at
pytestmark = pytest.mark.usefixtures("cache")


def examined(
    model: Path | str,
    draft: Path | str | None = None,
    devices: tuple[Device, ...] = (CPU,),
    runtime: str = "auto",
) -> Report:
    asked = AskedOptions(draft=None if draft is None else str(draft), runtime=runtime)
    return diagnose(str(model), asked, quiet, devices=lambda: list(devices))


def found(report: Report, group: str, check: str) -> Finding:
    """The worst where there are several."""
    order = list(Severity)
    matching = [each for each in report.findings if (each.group, each.check) == (group, check)]
    return max(matching, key=lambda each: order.index(each.level))


# The machine


def test_devices_and_why_others_cannot_be_used() -> None:
    missing = Device("coreml", None, None, "", fault="it needs macOS")
    broken = Device("llamacpp", "cuda0", "gpu", "A GPU", fault="the driver is too old")
    report = examined(NOWHERE, devices=(missing, broken, CPU))
    told = [(each.level, each.found) for each in report.findings if each.check == "devices"]
    assert told == [
        (Severity.NOTE, "not coreml: it needs macOS"),
        (Severity.WARNING, "llamacpp cuda0: the driver is too old"),
        (Severity.OK, "ort cpu: the processor"),
    ]
    alone = found(examined(NOWHERE, devices=(missing,)), "machine", "devices")
    assert (alone.level, alone.found) == (Severity.FAULT, "none can be used")


@pytest.mark.parametrize("place", ["cache", "cache/below"])
def test_a_cache_that_is_no_directory_is_told(
    cache: Path, gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A model that has to be converted first cannot be used."""
    cache.write_text("a file")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(cache.parent / place))
    report = examined(gguf(), runtime="ort")
    disk = found(report, "machine", "disk")
    assert disk.level is Severity.WARNING and disk.found.startswith(f"{cache} is no directory")
    conversion = found(report, "target", "conversion")
    assert conversion.level is Severity.FAULT and "EDGE_SPEC_CACHE" in conversion.remedy


def test_what_is_kept_is_counted_and_nothing_of_it_changed(cache: Path) -> None:
    file = cache / "answers/x.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3_000_000))
    assert found(examined(NOWHERE), "caches", "kept").found == "answers 3 MB"
    assert file.stat().st_size == 3_000_000


@pytest.mark.parametrize("key", ["general__alignment", "general__architecture"])
def test_what_a_file_says_is_cut(tiny: ModuleType, tmp_path: Path, key: str) -> None:
    path = tiny.write_gguf(tiny.build(), tmp_path / "model.gguf", **{key: "x" * 200_000})
    report = examined(path)
    assert report.verdict == "faults"
    assert all(len(each.found) < 2000 for each in report.findings)
    assert any("xxx" in each.found for each in report.findings)


def test_what_a_model_says_never_reaches_the_terminal_as_a_command() -> None:
    lines = table_lines([("", ("tokens", "eos \x1b[2J\x07!")), ("red", ("[bold]", "x" * 300))])
    first, second = lines
    assert first.split() == ["tokens", "eos", "?[2J?!"]
    assert second.split() == ["[bold]", "x" * 300]  # a line of a pipe is not folded


# A pair


@pytest.fixture
def bundle(exported: Callable[..., Bundle], tmp_path: Path) -> Callable[..., Path]:
    """bundle(name, swapped=(), **changes): a copy whose manifest says something else, with the
    ids of two tokens exchanged."""

    def make(name: str, swapped: tuple[str, ...] = (), **changes: Any) -> Path:
        path = Path(shutil.copytree(exported().path, tmp_path / name))
        if swapped:
            document = json.loads((path / "tokenizer.json").read_text())
            ids, (one, other) = document["model"]["vocab"], swapped
            ids[one], ids[other] = ids[other], ids[one]
            (path / "tokenizer.json").write_text(json.dumps(document))
        architecture = read_manifest(path).architecture | changes.pop("architecture", {})
        rewrite(path, architecture=architecture, **changes)
        return path

    return make


def test_a_pair_bundle_is_examined_with_its_own_draft_and_nothing_is_opened(
    pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_nothing(*arguments: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(type(runtimes.load_runtime("ort")), "open", open_nothing)
    report = examined(pair)
    assert {each.group for each in report.findings} == {
        *("machine", "target", "draft", "pair", "memory", "speed", "caches")
    }
    assert report.verdict == "warnings"  # a draft of one of two layers is not small
    assert found(report, "pair", "size").level is Severity.WARNING
    assert found(report, "pair", "tokens").found == "the same 265 ids"
    assert found(report, "pair", "context").level is Severity.OK
    assert found(report, "memory", "together").level is Severity.OK
    assert found(report, "speed", "break-even").remedy.startswith(f"Run edge-spec plan {pair}")
    assert len(report.findings) < 40
    json.dumps(document(report))
    assert not cache.exists()  # nor anything written


def test_other_tokens_are_listed_and_what_they_cost(bundle: Callable[..., Path]) -> None:
    report = examined(bundle("target"), bundle("draft", ("t", "e")))
    tokens = found(report, "pair", "tokens")
    assert tokens.level is Severity.WARNING and tokens.found.startswith("2 of 265 ids")
    shown = [each.found for each in report.findings if each.check == "tokens"][1]
    assert "'t' | 'e'" in shown and "'e' | 't'" in shown
    assert tokens.numbers == {"num_different": 2, "draft_tokens_per_target_token": 1.0}


def test_other_ends_of_one_vocabulary_are_a_warning(bundle: Callable[..., Path]) -> None:
    report = examined(bundle("target"), bundle("draft", eos_ids=(263,)))
    ends = found(report, "pair", "ends")
    assert ends.level is Severity.WARNING and "the draft's in [2" in ends.found


def test_a_shorter_context_of_the_draft_is_a_warning(bundle: Callable[..., Path]) -> None:
    draft = bundle("draft", architecture={"context_length": 64})
    context = found(examined(bundle("target"), draft), "pair", "context")
    assert context.level is Severity.WARNING and "after 64 nothing is drafted" in context.found


@pytest.mark.parametrize(
    ("free", "total", "level", "check", "told"),
    [
        (3000, 4000, Severity.OK, "together", "free"),
        (1500, 4000, Severity.WARNING, "together", "more than is free"),
        (500, 700, Severity.FAULT, "forecast", "and there are 700 MB"),
    ],
)
def test_memory_is_compared_with_what_is_free(
    bundle: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    total: int,
    level: Severity,
    check: str,
    told: str,
) -> None:
    """A cache of 200 kB a token, whatever the runtime would say."""

    def memory(self: object, source: object, options: object, num_tokens: int) -> Memory:
        return Memory(100_000_000, 200_000 * num_tokens, 0)

    monkeypatch.setattr(type(runtimes.load_runtime("ort")), "memory", memory)
    monkeypatch.setattr("edge_spec.models.memory.free_bytes", lambda: free * 1_000_000)
    monkeypatch.setattr("edge_spec.models.memory.total_bytes", lambda: total * 1_000_000)
    report = examined(bundle("target", architecture={"context_length": 8192}))
    together = found(report, "memory", check)
    assert together.level is level and told in together.found
    if level is not Severity.FAULT:
        assert together.numbers["total_bytes"] == 100_000_000 + 8192 * 200_000


def test_break_even_is_where_a_token_costs_what_it_costs_alone() -> None:
    costs = RowCosts({1: 1.0, 2: 1.2, 3: 1.4, 5: 1.8, 9: 3.0})
    assert break_even(1, costs, 0.0) == pytest.approx(0.2, abs=1e-3)
    # a + a^2 = 0.4
    assert break_even(2, costs, 0.0) == pytest.approx(0.3062, abs=1e-3)
    assert break_even(1, costs, 0.3) == pytest.approx(0.5, abs=1e-3)
    assert break_even(1, costs, 0.8) == pytest.approx(1.0, abs=1e-3)
    assert break_even(1, costs, 0.9) is None


def profiled(model: Path, draft: Path, target_s: float, draft_s: float) -> None:
    """As if both had been measured here."""
    plan, _ = choose_plan(plans_for(Source(str(model), quiet), AskedOptions(draft=str(draft))))
    for each, seconds in zip((plan.target, *plan.drafts), (target_s, draft_s), strict=True):
        prepared = each.find()
        assert prepared is not None
        key = profile_key(each.source, prepared)
        rows = {1: seconds, 2: 1.2 * seconds, 8: 2.4 * seconds}
        save_profile(key, Profile(rows, rounds=5, spread=0.0))


def test_break_even_comes_from_the_profiles_of_both(bundle: Callable[..., Path]) -> None:
    target, draft = bundle("target"), bundle("draft")
    profiled(target, draft, 0.01, 0.002)
    report = examined(target, draft)
    step, least = (found(report, "speed", check) for check in ("step", "break-even"))
    # 0.2 for a row, 0.2 a draft token
    assert least.numbers["acceptance"][1] == pytest.approx(0.4, abs=1e-3)
    assert step.numbers == {"step_ms": 10.0, "draft_step_ms": 2.0}
    assert "1: 40%" in least.found


def test_a_draft_that_is_slower_than_its_target_is_warned_of(bundle: Callable[..., Path]) -> None:
    target, draft = bundle("target"), bundle("draft")
    profiled(target, draft, 0.01, 0.02)
    report = examined(target, draft)
    assert found(report, "speed", "step").found == "a step of the draft takes 2.00 of the target's"
    assert found(report, "speed", "break-even").found == "speculation never pays here"


def test_a_fault_of_the_draft_ends_the_examination(bundle: Callable[..., Path]) -> None:
    draft = bundle("draft")
    (draft / "model.onnx").write_bytes(b"")
    report = examined(bundle("target"), draft)
    assert report.verdict == "faults"
    assert found(report, "draft", "files").level is Severity.FAULT
    assert not {"pair", "memory", "speed"} & {each.group for each in report.findings}
    assert not any(
        each.check == "chat template" and each.group == "draft" for each in report.findings
    )


def test_a_model_that_its_runtime_cannot_have_is_a_fault(bundle: Callable[..., Path]) -> None:
    report = examined(bundle("target", format="nothing-reads-this"))
    assert found(report, "target", "runtime").level is Severity.FAULT


def test_nothing_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path]
) -> None:
    def fetch(*arguments: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr("edge_spec.models.hub_download.pull", fetch)
    monkeypatch.setattr("edge_spec.models.source.fetch_demo_model", fetch)
    monkeypatch.setattr("edge_spec.models.source.find_demo_model", lambda: None)
    report = examined("smollm2")
    assert (report.verdict, found(report, "target", "model").level) == ("ok", Severity.NOTE)
    report = examined(bundle("target"), "smollm2")
    assert found(report, "draft", "model").level is Severity.FAULT  # this one was asked for
    report = examined("hf:org/name")
    assert report.verdict == "faults"
    assert found(report, "target", "model").remedy == "Fetch it: edge-spec pull hf:org/name."
