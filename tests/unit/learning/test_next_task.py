"""What there is to do, by what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_spec.learning.folder import LearningState
from edge_spec.learning.idle_learning import FIRST_TOKENS, Task, next_task
from edge_spec.learning.texts import TextEntry
from edge_spec.learning.trial import Replayed, best_head

BEGUN = LearningState(1, "m")
LEARNT = replace(BEGUN, candidate="00000010", learnt_until=10, judged_until=10, learnt_tokens=2000)
JUDGED = replace(LEARNT, judged_until=14)


def entries(first: int, count: int, tokens: int) -> list[TextEntry]:
    return [TextEntry(first + i, tokens) for i in range(count)]


@pytest.mark.parametrize(
    ("state", "texts", "expected"),
    [
        (BEGUN, [], None),
        (BEGUN, entries(0, 3, FIRST_TOKENS), None),  # three answers are no sample
        (BEGUN, entries(0, 8, FIRST_TOKENS // 8 - 1), None),
        (BEGUN, entries(0, 8, FIRST_TOKENS // 8), Task.TRAIN),
        (LEARNT, entries(0, 10, 200), None),  # it has learnt from all of them
        (LEARNT, entries(0, 13, 200), None),
        (LEARNT, entries(0, 14, 200), Task.JUDGE),
        (LEARNT, entries(0, 14, 20), None),  # too few tokens
        (JUDGED, entries(0, 14, 200), Task.TRAIN),
        (JUDGED, entries(0, 14, 90), None),  # nothing new since, and too little to learn from
        (replace(JUDGED, learnt_tokens=20_000), entries(0, 14, 200), None),  # a tenth is due
        (JUDGED, entries(0, 18, 200), Task.JUDGE),
    ],
)
def test_answers_are_judged_by_before_they_are_learnt_from(
    state: LearningState, texts: list[TextEntry], expected: Task | None
) -> None:
    assert next_task(state, texts) is expected


def test_what_was_begun_is_gone_on_with() -> None:
    assert next_task(BEGUN, entries(0, 2, 10), is_begun=True) is Task.TRAIN
    assert next_task(LEARNT, entries(0, 10, 200), is_begun=True) is Task.TRAIN


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [({}, None), ({"a": 0.99}, None), ({"a": 0.97}, "a"), ({"a": 0.9, "b": 0.8}, "b")],
)
def test_a_head_has_to_be_faster_by_a_margin(
    seconds: dict[str, float], expected: str | None
) -> None:
    found = {name: Replayed(each, 1.0) for name, each in seconds.items()}
    assert best_head(Replayed(1.0, 1.0), found, 0.02) == expected
