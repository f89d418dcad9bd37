"""Options of a command that names several models."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.loader import options_of_others
from edge_spec.models.asked_options import AskedOptions

SHARED: dict[str, Any] = {"runtime": "reference", "threads": 2, "context_length": 512}
OF_DRAFT: dict[str, Any] = {"draft_runtime": "ort", "draft_device": "cpu", "draft_threads": 1}


@pytest.mark.parametrize(
    ("asked", "others"),
    [
        ({}, {}),
        ({"drafter": "none"}, {"drafter": "none"}),
        ({"draft": "none", "drafter": "suffix"}, {"draft": "none", "drafter": "suffix"}),
        ({"draft": ["auto"], **OF_DRAFT}, {"draft": ["auto"], **OF_DRAFT}),
        ({"draft": "small.gguf", **OF_DRAFT}, {}),
        ({"draft": ["small.gguf"], "drafter": "suffix,draft-model"}, {}),
        ({"draft": ["small.gguf"], "drafter": "suffix"}, {"drafter": "suffix"}),
        ({"exit_layer": 2}, {}),
    ],
)
def test_what_is_about_one_model_stays_with_the_first(
    asked: dict[str, Any], others: dict[str, Any]
) -> None:
    found = options_of_others(AskedOptions(**SHARED, **asked))
    assert found == AskedOptions(**SHARED, **others)
