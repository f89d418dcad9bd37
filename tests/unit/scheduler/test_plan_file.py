"""The file of a plan, and options that contradict it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.plan_file import (
    Place,
    Placement,
    Plan,
    pinned_options,
    read_plan,
    write_plan,
)
from fixtures.silence import quiet

MB = 1_000_000


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
    return next(pinned_options(source, LoadOptions(plan=file, **more)))


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
        next(pinned_options(source, LoadOptions(plan=file)))
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
        next(pinned_options(draft, LoadOptions(plan=tmp_path / "plan.json")))


def test_the_placements_of_a_plan_are_tried_in_their_order(source: Source, tmp_path: Path) -> None:
    write_plan(plan_of(source, BEST, NEXT), tmp_path / "plan.json")
    found = list(pinned_options(source, LoadOptions(plan=tmp_path / "plan.json")))
    assert [(each.runtime, each.drafter) for each in found] == [
        ("llamacpp", "suffix"),
        ("ort", "none"),
    ]


def test_a_plan_that_is_not_there_is_told_with_the_command_that_makes_it(source: Source) -> None:
    with pytest.raises(UsageError, match=r"there is no plan .*edge-spec plan .* --out"):
        next(pinned_options(source, LoadOptions(plan="no-such-plan.json")))
