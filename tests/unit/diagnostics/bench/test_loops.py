"""Which tokens of a text lie in loops."""

from __future__ import annotations

import pytest

from edge_spec.diagnostics.bench.report import MAX_PERIOD, in_loops

SENTENCE = [11, 12, 13, 14]


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
    assert in_loops(text).sum() == expected
