"""Which tokens of a text lie in loops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edge_spec.diagnostics.bench.figures import MAX_PERIOD, MIN_OCCURRENCES, tokens_in_loops

SENTENCE = [11, 12, 13, 14]


def slowly(tokens: Sequence[int]) -> int:
    """Counts them by the words of the definition: every stretch, for every period."""
    looping = set()
    for period in range(1, MAX_PERIOD + 1):
        for start in range(len(tokens) - MIN_OCCURRENCES * period + 1):
            end = start + MIN_OCCURRENCES * period
            if all(tokens[i] == tokens[i - period] for i in range(start + period, end)):
                looping |= set(range(start + period, end))
                while end < len(tokens) and tokens[end] == tokens[end - period]:
                    looping.add(end)
                    end += 1
    return len(looping)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([1, 2, *SENTENCE * 2, 3], 0),  # said twice
        ([1, 2, *SENTENCE * 3, 3], 8),  # all but the first time
        ([1, 2, *SENTENCE * 3, 11, 12, 3], 10),  # and once more in part
        ([7, 7, 7], 2),
        ([*SENTENCE, 5, *SENTENCE, 6, *SENTENCE], 0),  # not in a row
        ([*SENTENCE * 3, 1, 2, 3, *[9] * 5], 8 + 4),
        ([11, 11, 12] * 4, 9),  # a passage that repeats a token, counted once
        (list(range(MAX_PERIOD)) * 3, 2 * MAX_PERIOD),
        (list(range(MAX_PERIOD + 1)) * 3, 0),  # longer than what counts
    ],
)
def test_a_loop_is_a_passage_three_times_in_a_row(text: list[int], expected: int) -> None:
    assert tokens_in_loops(text) == expected


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_what_the_definition_says(seed: int) -> None:
    """In texts of few different tokens, which are full of loops within loops."""
    generator = random.Random(seed)
    text = generator.choices(range(2 + seed % 3), k=60)
    passage = generator.choices(range(3), k=1 + seed % 7)
    text[20:20] = passage * generator.randrange(2, 6)
    assert tokens_in_loops(text) == slowly(text)
