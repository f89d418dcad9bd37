"""What a place that fails is said to have failed by; and a device has to compute right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edge_spec.core.isolated import NoAnswerError, reason_of
from edge_spec.errors import SessionError
from edge_spec.placement import survey
from edge_spec.placement.survey import measure_apart, require_right
from edge_spec.testing import ScriptedModel
from edge_spec.testing.scripted import random_logits


def test_what_a_library_raises_is_a_reason_in_one_line() -> None:
    assert reason_of(RuntimeError("a\nlong story")) == "a long story"


@pytest.mark.parametrize(
    ("done", "reason"),
    [(None, "no answer"), (0.3, "it is too slow: 30% was done within 300 s")],
)
def test_a_silent_device_is_told_from_a_slow_one(
    done: float | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isolated(*given: object, on_step: Any, **more: object) -> None:
        if done is not None:
            on_step(done)
        raise NoAnswerError("no answer")

    monkeypatch.setattr(survey, "isolated", isolated)
    monkeypatch.setattr(survey, "described", lambda *given: "a place")
    place = SimpleNamespace(
        source=SimpleNamespace(model=""), device=None, prepared=SimpleNamespace(how=None)
    )
    with pytest.raises(NoAnswerError) as caught:
        measure_apart(cast(Any, place), 1.0, lambda fraction: None, [])
    assert str(caught.value) == reason


SIZE = 50
RIGHT = random_logits(SIZE)
PROMPT = [3, 1, 4]


def greedy(num_tokens: int = 40) -> list[int]:
    text = list(PROMPT)
    for _ in range(num_tokens):
        text.append(int(RIGHT(tuple(text)).argmax()))
    return text[len(PROMPT) :]


def test_a_model_agrees_with_its_own_texts_in_passes_of_many_rows() -> None:
    require_right(ScriptedModel(RIGHT, SIZE), [(PROMPT, greedy())])
    require_right(ScriptedModel(RIGHT, SIZE), [])


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (lambda tokens: np.roll(RIGHT(tokens), 1), "it computes wrong: 0% of its tokens"),
        (lambda tokens: np.full(SIZE, np.nan, np.float32), "its scores are no numbers"),
    ],
)
def test_a_device_that_computes_wrong_is_refused(logits: Any, reason: str) -> None:
    with pytest.raises(SessionError, match=reason):
        require_right(ScriptedModel(logits, SIZE), [(PROMPT, greedy())])


def test_scores_have_to_be_numbers_also_where_nothing_tells_what_is_right() -> None:
    with pytest.raises(SessionError, match="no numbers"):
        require_right(ScriptedModel(lambda tokens: np.full(SIZE, np.inf, np.float32), SIZE), [])
