"""What leaves it to measurements where a model runs, and which drafts have a chip of their own."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.core.modes import DraftOverlap
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.engine_plan import EnginePlan, is_open
from fixtures.silence import quiet


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"drafter": "none"},
        {"draft": ("small.gguf",)},
        {"context_length": 512},
        {"drafter": "jacobi"},
    ],
)
def test_drafters_and_the_context_leave_the_place_open(asked: dict[str, Any]) -> None:
    assert is_open(LoadOptions(**asked))


@pytest.mark.parametrize(
    "asked",
    [
        {"runtime": "ort"},
        {"device": "cuda"},
        {"threads": 2},
        {"draft_runtime": "ort"},
        {"draft_device": "cuda"},
        {"draft_threads": 1, "draft": ("small.gguf",)},
        {"quantization": "int8"},
        {"gpu_layers": 3},
        {"kv_type": "f16"},
        {"rpc": ("a:1",)},
        {"exact": True},
        {"draft_overlap": "on", "draft": ("small.gguf",)},
        {"draft": ("small.gguf", "smaller.gguf")},
    ],
)
def test_what_says_how_a_model_runs_does_not(asked: dict[str, Any]) -> None:
    assert not is_open(LoadOptions(**asked))


@pytest.mark.parametrize(
    ("target", "draft", "elsewhere"),
    [
        *(("cpu", "CPU", False), ("cpu", "cuda0", True), ("gpu", "cpu", True)),
        *(("cuda", "cuda:0", False), ("cuda0", "cuda1", True), ("cuda0", "vulkan0", True)),
        *(("gpu", "cuda1", False), ("gpu", "gpu", False), ("gpu", "npu", True)),
        *(("qnn", "ane", False), ("cuda0,cuda1", "cuda1", False), (None, None, False)),
    ],
)
def test_a_draft_is_elsewhere_where_no_chip_is_shared(
    target: str | None, draft: str | None, elsewhere: bool
) -> None:
    options = LoadOptions(draft="small.gguf", device=target, draft_device=draft)
    source = Source("model", quiet)
    places = options.runtime_options, options.draft_runtime_options
    first, second = (ModelPlan(source, "ort", how) for how in places)
    plan = EnginePlan(options, first, (second,))
    assert plan.drafts_elsewhere is elsewhere
    assert plan.overlap is (DraftOverlap.AUTO if elsewhere else DraftOverlap.OFF)
    assert not EnginePlan(options, first).drafts_elsewhere
