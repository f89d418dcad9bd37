"""The tokens that a drafter scores are those of answers, the most frequent first."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.distill.conversations import Conversation, coverage, filled_up, most_written
from edge_spec.distill.request import default_scored
from edge_spec.testing.scripted import smallest_config


def _said(prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(np.array([*prompt, *answer], np.int32), len(prompt), False)


def test_answers_are_counted_and_prompts_fill_up() -> None:
    said = [_said([7, 7, 7, 8], [3, 3, 5]), _said([8, 7], [3, 5, 9])]
    assert most_written(said, 12, 2).tolist() == [3, 5]
    assert most_written(said, 12, 4).tolist() == [3, 5, 7, 9]  # 9 once in an answer, 7 in prompts
    assert most_written(said, 12, 100).tolist() == [3, 5, 7, 8, 9]


def test_the_end_of_a_text_is_always_scored() -> None:
    assert most_written([_said([1], [3, 3, 4])], 12, 2, always=(11,)).tolist() == [3, 11]


def test_the_first_tokens_of_a_vocabulary_fill_up_what_was_never_written() -> None:
    assert filled_up(np.array([1, 7]), 12, 4).tolist() == [0, 1, 2, 7]
    assert filled_up(np.array([1, 7]), 3, 9).tolist() == [0, 1, 2, 7]
    assert filled_up(np.array([1, 7]), 12, 1).tolist() == [1, 7]


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [((576, 1536, 30, 49152), 4096, 4096), ((1536, 8960, 28, 151936), 16_000, 24_000)],
)
def test_a_head_of_a_large_model_scores_more_tokens(
    sizes: tuple[int, ...], least: int, most: int
) -> None:
    hidden, inner, layers, vocab_size = sizes
    values = smallest_config("scripted", vocab_size, 100).to_dict()
    given = {"hidden_size": hidden, "intermediate_size": inner, "num_layers": layers}
    config = ModelConfig.from_dict(values | given)
    assert least <= default_scored(config) <= most


def test_coverage_is_of_answers_alone() -> None:
    assert coverage([_said([1, 1], [3, 4, 5, 6])], np.array([3, 4, 5])) == 0.75
