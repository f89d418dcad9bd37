"""The tokens that a drafter scores are those of answers, the most frequent first."""

from __future__ import annotations

import numpy as np

from edge_spec.distill.conversations import Conversation, coverage, most_written


def _said(prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(np.array([*prompt, *answer], np.int32), len(prompt), False)


def test_answers_are_counted_and_prompts_fill_up() -> None:
    said = [_said([7, 7, 7, 8], [3, 3, 5]), _said([8, 7], [3, 5, 9])]
    assert most_written(said, 12, 2).tolist() == [3, 5]
    assert most_written(said, 12, 4).tolist() == [3, 5, 7, 9]  # 9 once in an answer, 7 in prompts
    assert most_written(said, 12, 100).tolist() == [3, 5, 7, 8, 9]


def test_the_end_of_a_text_is_always_scored() -> None:
    assert most_written([_said([1], [3, 3, 4])], 12, 2, always=(11,)).tolist() == [3, 11]


def test_coverage_is_of_answers_alone() -> None:
    assert coverage([_said([1, 1], [3, 4, 5, 6])], np.array([3, 4, 5])) == 0.75
