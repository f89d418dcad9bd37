"""Plans: their file, the choice among placements now, options that contradict them, the ranking."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import plan as plan_module
from edge_spec.placement.plan import (
    Place,
    Placement,
    Plan,
    keep_plan,
    planned,
    read_plan,
    write_plan,
)
from fixtures.silence import quiet

MB = 1_000_000
FREE = 500 * MB


def place(runtime: str = "ort", device: str = "cpu", threads: int | None = None) -> Place:
    library, kernels = runtimes.library_version(runtime), runtimes.own_kernels(runtime)
    return Place(runtime, device, threads, "int4 block 32", library, kernels=kernels)


def placement(
    target: Place, drafter: str = "suffix", rate: float = 100.0, **more: Any
) -> Placement:
    found = Placement(target, None, drafter, rate, speedup=1.25, acceptance=0.5)
    return replace(found, memory_bytes=100 * MB, **more)


BEST = placement(place("llamacpp"), rate=200.0)
NEXT = placement(place("ort"), "none")
PAIRED = replace(BEST, draft=place("ort", threads=1), drafter="draft-model", memory_bytes=300 * MB)


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and as much memory as the tests say."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_module, "free_bytes", lambda: FREE)
    monkeypatch.setattr(plan_module, "list_devices", list)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    return Source(str(file), quiet)


@pytest.fixture
def draft(tmp_path: Path) -> Source:
    file = tmp_path / "d.gguf"
    file.write_bytes(b"GGUF draft")
    return Source(str(file), quiet)


def plan_of(source: Source, *placements: Placement, draft: Source | None = None) -> Plan:
    return Plan(
        version=1,
        model=source.model,
        identity=source.identity,
        draft=draft.model if draft else None,
        draft_identity=draft.identity if draft else None,
        placements=placements,
    )


def pinned(
    source: Source, tmp_path: Path, *placements: Placement, pair: Source | None = None, **more: Any
) -> LoadOptions:
    file = tmp_path / "plan.json"
    write_plan(plan_of(source, *placements, draft=pair), file)
    return planned(source, LoadOptions(plan=file, **more), quiet)


def test_a_plan_is_read_as_it_was_written(source: Source, draft: Source, tmp_path: Path) -> None:
    plan = plan_of(source, BEST, PAIRED, replace(NEXT, tokens_per_s=None), draft=draft)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["placements"][0]["drafter"] == "suffix"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"version": 2}, "version"),
        ({"placements": []}, "placements"),
        ({"prefer": "energy"}, "prefer"),  # of before, where the first is not the fastest
        ({"model": 3}, "model"),
        ({"placements": [{"drafter": "suffix"}]}, "placements.0.target"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(
    change: dict[str, Any], where: str, source: Source, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan_of(source, BEST), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=where) as refused:
        planned(source, LoadOptions(plan=file), quiet)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_plan_that_was_edited_is_refused_until_its_seal_is_deleted(
    source: Source, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan_of(source, BEST), file)
    plan = json.loads(file.read_text())
    file.write_text(file.read_text().replace('"suffix"', '"jacobi"'))
    with pytest.raises(UsageError, match=r"sha256 differs.*delete its sha256"):
        read_plan(file)
    del plan["sha256"]
    file.write_text(json.dumps(plan))
    assert read_plan(file) == plan_of(source, BEST)


def test_a_pinned_plan_says_where_all_runs(source: Source, draft: Source, tmp_path: Path) -> None:
    options = pinned(source, tmp_path, PAIRED, pair=draft)
    assert options == LoadOptions(
        runtime="llamacpp",
        device="cpu",
        drafter="draft-model",
        draft=(draft.model,),
        draft_runtime="ort",
        draft_device="cpu",
        draft_threads=1,
    )
    assert options.draft_runtime_options.threads == 1 and options.runtime_options.threads is None


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"runtime": "ort"}, "--runtime"),
        ({"device": "cuda"}, "--device"),
        ({"threads": 2}, "--threads"),
        ({"drafter": "recycling"}, "--drafter"),
        ({"draft": ("other.gguf",)}, "--draft "),
        ({"draft_device": "cuda"}, "--draft-device"),
        ({"rpc": ("a:1",)}, "--rpc"),
        ({"quantization": "int8"}, "--quantization"),
        ({"gpu_layers": 3}, "--gpu-layers"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_option_that_contradicts_a_pinned_plan_is_refused(
    given: dict[str, Any], flag: str, source: Source, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"^{flag}.*contradicts the plan"):
        pinned(source, tmp_path, BEST, **given)


def test_a_plan_for_another_model_is_refused(source: Source, draft: Source, tmp_path: Path) -> None:
    write_plan(plan_of(source, BEST), tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"is a plan for .*m\.gguf, not for .*d\.gguf"):
        planned(draft, LoadOptions(plan=tmp_path / "plan.json"), quiet)


def too_large(each: Placement) -> Placement:
    return replace(each, memory_bytes=FREE + 1)


def elsewhere(each: Placement) -> Placement:
    return replace(each, target=replace(each.target, device="cuda"))


@pytest.mark.parametrize(
    ("change", "why"),
    [(too_large, "it needs 500 MB of 500 MB free"), (elsewhere, "llamacpp has no device cuda now")],
)
def test_the_next_best_is_taken_and_one_line_says_why(
    change: Any, why: str, source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        options = pinned(source, tmp_path, change(BEST), NEXT)
    assert (options.runtime, options.drafter) == ("ort", "none")
    assert len(caplog.messages) == 1 and why in caplog.messages[0]


def test_where_nothing_is_left_a_pinned_plan_is_refused_and_a_cached_one_passed_over(
    source: Source, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"nothing in .* it needs 500 MB of 500 MB free"):
        pinned(source, tmp_path, too_large(BEST), too_large(NEXT))
    keep_plan(plan_of(source, too_large(BEST)))
    assert planned(source, LoadOptions(), quiet) == LoadOptions()


def test_a_runtime_that_is_not_installed_is_told_with_its_remedy(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "find_spec", lambda module: None)
    with pytest.raises(UsageError, match=r"pip install .edge-spec\[llamacpp\]"):
        pinned(source, tmp_path, BEST)


def test_a_kept_plan_says_where_and_never_who_drafts(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "AUTO_RUNTIMES", runtimes.AUTO_RUNTIMES[::-1])
    keep_plan(plan_of(source, replace(BEST, drafter="none"), NEXT))
    said: list[str] = []
    options = planned(source, LoadOptions(), lambda what, fraction: said.append(what))
    assert (options.runtime, options.providers, options.drafter) == ("llamacpp", ("cpu",), "auto")
    assert len(said) == 1 and "int4 block 32" in said[0]  # perhaps not the default's weights
    assert planned(source, LoadOptions(drafter="suffix"), quiet).drafter == "suffix"


def test_a_library_that_is_new_outdates_a_kept_plan(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_plan(plan_of(source, BEST))
    known = runtimes.library_version
    monkeypatch.setattr(
        runtimes, "library_version", lambda name: "9" if name == "coreml" else known(name)
    )
    assert planned(source, LoadOptions(), quiet) == LoadOptions()


@pytest.mark.parametrize(
    "given",
    [
        {"runtime": "ort"},
        {"device": "cpu"},
        {"threads": 1},
        {"quantization": "int8"},
        {"block_size": 64},
        {"exact": True},
        {"kv_type": "f16"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_whoever_chooses_a_place_or_other_weights_gets_no_plan_from_the_cache(
    given: dict[str, Any], source: Source
) -> None:
    keep_plan(plan_of(source, BEST))
    assert planned(source, LoadOptions(**given), quiet) == LoadOptions(**given)


def test_a_draft_that_was_asked_for_stays_where_a_plan_found_it_no_use(
    source: Source, draft: Source
) -> None:
    keep_plan(plan_of(source, NEXT))
    keep_plan(plan_of(source, BEST, PAIRED, draft=draft))
    both = LoadOptions(draft=(draft.model,))
    for drafter in ("auto", "cascade"):
        found = planned(source, replace(both, drafter=drafter), quiet)
        assert (found.drafts, found.drafter) == ((draft.model,), drafter)
        assert (found.runtime, found.draft_threads) == ("llamacpp", 1)
    keep_plan(plan_of(source, BEST, draft=draft))  # as where the two have other tokens
    assert planned(source, both, quiet) == replace(both, runtime="llamacpp", device="cpu")


@pytest.mark.parametrize("change", [{"library": "0.1"}, {"kernels": "of before"}])
def test_a_plan_of_another_library_or_other_kernels_is_not_used_unasked(
    change: dict[str, str], source: Source, tmp_path: Path
) -> None:
    older = replace(BEST, target=replace(BEST.target, **change))
    keep_plan(plan_of(source, older))
    assert planned(source, LoadOptions(), quiet) == LoadOptions()
    assert pinned(source, tmp_path, older).runtime == "llamacpp"
