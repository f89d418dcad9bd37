"""Which options leave it to measurements where a model runs."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.engine_plan import is_open


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
