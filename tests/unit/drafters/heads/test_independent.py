"""Trees of heads whose draft tokens are independent of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edge_spec.core.heads import HeadScores
from edge_spec.drafters.heads.independent import IndependentDrafter, head_scores
from edge_spec.drafters.protocol import Budget

VOCAB, HEADS = 8, 3
# 0.5, 0.25, 0.125 ... of the likeliest tokens of every head.
LOGITS = np.log(np.array([0.5**rank for rank in range(1, VOCAB + 1)], np.float32))


class Heads:
    num_heads = HEADS
    reported_acceptance: Sequence[float] = ()

    def __init__(self, shares_output: bool) -> None:
        self.shares_output = shares_output

    def spread(self, scores: np.ndarray) -> np.ndarray:
        return scores


class Drafter(IndependentDrafter):
    def __init__(self, shares_output: bool) -> None:
        super().__init__(Heads(shares_output), "heads")
        self.asked: list[list[int]] = []

    @property
    def _is_ready(self) -> bool:
        return True

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        self.asked.append(list(heads))
        return head_scores(np.tile(LOGITS, (len(heads), 1)))


@pytest.mark.parametrize(("shares_output", "depth"), [(True, HEADS), (False, 1)])
def test_rows_that_come_with_a_pass_need_not_be_worth_one(shares_output: bool, depth: int) -> None:
    drafter = Drafter(shares_output)
    drafter.begin([1])
    tree = drafter.propose(1, Budget(HEADS, 12, min_reach=0.9, least_reach=0.05))
    assert int(tree.depths.max()) == depth
    assert len(tree.children(0)) > 1
    assert drafter.passes == len(drafter.asked) == 1


def test_heads_that_are_asked_one_by_one_take_a_pass_each() -> None:
    drafter = Drafter(shares_output=False)
    drafter.begin([1])
    drafter.propose(1, Budget(HEADS, 12))
    assert drafter.asked == [[0], [1], [2]] and drafter.passes == HEADS
