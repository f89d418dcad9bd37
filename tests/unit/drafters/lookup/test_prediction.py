"""What is drafted from a predicted text, where the answer parts from it, and what of it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import Verdict
from edge_spec.drafters.lookup.suffix import PredictedText, PredictionDrafter, num_appeared
from edge_spec.drafters.protocol import Budget

BUDGET = Budget(num_draft_tokens=4, num_rows=16)
OUT = Forward(np.zeros((1, 1), np.float32))
TEXT = list(range(10, 60))


def drafted(prediction: Sequence[int], answer: Sequence[int], budget: Budget = BUDGET) -> list[int]:
    """What a drafter proposes after an answer that it saw token by token."""
    drafter = PredictionDrafter(prediction)
    drafter.begin([1, 2])
    pending = 2
    for token in answer:
        tree = drafter.propose(pending, budget)
        verdict = Verdict((token,), (), exhausted=False)
        drafter.observe(tree, OUT, verdict)
        pending = token
    tree = drafter.propose(pending, budget)
    assert tree.is_chain and set(tree.proposed_by[1:]) <= {"prediction"}
    return tree.tokens[1:].tolist()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], TEXT[:4]),  # it is drafted before anything is written
        (TEXT[:3], TEXT[3:7]),
        (TEXT[:-2], TEXT[-2:]),
        (TEXT, []),
        ([*TEXT[:20], 7], []),  # parted: nothing is known
        ([*TEXT[:20], 7, 8, TEXT[21]], TEXT[22:26]),  # a token became two: one shared is enough
        ([*TEXT[:20], 7, TEXT[28]], TEXT[29:33]),  # some were left out
        ([*TEXT[:20], *[7] * 90, TEXT[20]], TEXT[21:25]),  # many were added
        ([7, TEXT[0]], TEXT[1:5]),  # a beginning that was not predicted
        ([*TEXT[:5], TEXT[45]], []),  # one shared token far away says nothing
        ([*TEXT[:5], *TEXT[42:45]], TEXT[45:49]),  # three do
        ([*TEXT[:40], *TEXT[:3]], TEXT[3:7]),  # and before, too
    ],
)
def test_what_follows_in_the_prediction_is_drafted(
    answer: Sequence[int], expected: Sequence[int]
) -> None:
    assert drafted(TEXT, answer) == list(expected)


@pytest.mark.parametrize(
    ("answer", "appeared"),
    [
        (TEXT, 50),
        ([], 0),
        (TEXT[:10], 10),
        ([*TEXT[:10], 7, *TEXT[11:]], 49),
        ([*TEXT[:10], 7, 8, 9, *TEXT[10:]], 50),
        ([*TEXT[:10], *TEXT[20:]], 40),
        ([*TEXT, *TEXT], 50),  # each of its tokens once
        (range(100, 150), 0),
        ([7, TEXT[30], 8, TEXT[20], 9], 0),  # single tokens are the same by chance
    ],
)
def test_tokens_of_the_prediction_that_the_answer_has(answer: Sequence[int], appeared: int) -> None:
    assert num_appeared(TEXT, answer) == appeared


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_counts_and_drafts_of_any_two_texts(prediction: list[int], answer: list[int]) -> None:
    assert 0 <= num_appeared(prediction, answer) <= len(prediction)
    assert num_appeared(prediction, prediction) == len(prediction)
    tokens = drafted(prediction, answer)
    joined = " ".join(map(str, prediction))
    assert " ".join(map(str, tokens)) in joined


def test_a_long_text_of_one_token_takes_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place is alike: all of them would be compared at each token that differs."""
    compared: list[int] = []
    num_shared = PredictedText._num_shared

    def counted(text: PredictedText, place: int) -> int:
        compared.append(place)
        return num_shared(text, place)

    monkeypatch.setattr(PredictedText, "_num_shared", counted)
    prediction, answer = [5] * 100_000, [6, 5] * 500
    assert num_appeared(prediction, answer) <= len(answer)
    assert 0 < len(compared) < 40 * len(answer)
