"""How long answers may be where nobody says it."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.cli.options import SamplingOptions
from edge_spec.text.parts.answer_form import AnswerForm, ThoughtForm

THOUGHT = ThoughtForm("<think>", "</think>", "</think>")


@pytest.mark.parametrize(
    ("asked", "form", "limit"),
    [
        ({}, None, 512),
        ({}, AnswerForm(), 512),
        ({}, AnswerForm(THOUGHT), 512 + 3584),
        ({}, AnswerForm(THOUGHT, budget=7), 512 + 7),
        ({}, AnswerForm(THOUGHT, is_closed=True), 512),
        ({"max_tokens": 5}, AnswerForm(THOUGHT, budget=7), 5),
    ],
)
def test_a_thought_has_room_beside_the_text(asked: Any, form: Any, limit: int) -> None:
    assert SamplingOptions(**asked).limit(form) == limit
