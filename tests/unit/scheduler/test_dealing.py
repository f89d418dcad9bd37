"""Rows of a shared pass by what they bring: against all ways to deal them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.dealing import Wish, charge, deal_rows


def linear(rows: int) -> float:
    return 8.0 + 0.9 * rows


def stepped(rows: int) -> float:
    """As of a kernel that takes rows by fours."""
    return 8.0 + 4.0 * -(-rows // 4)


def drawn_wishes(seed: int) -> list[Wish]:
    rng = np.random.default_rng(seed)
    chances = [np.cumprod([1.0, *rng.random(rng.integers(0, 5))]) for _ in range(3)]
    return [Wish(tuple(each), min(len(each), int(rng.integers(1, 3)))) for each in chances]


def tokens_per_s(
    wishes: list[Wish], counts: tuple[int, ...], seconds: Callable[[int], float]
) -> float:
    tokens = sum(sum(wish.values[:count]) for wish, count in zip(wishes, counts, strict=True))
    return tokens / seconds(sum(counts))


def all_ways(wishes: list[Wish], room: int) -> Iterator[tuple[int, ...]]:
    for counts in product(*(range(wish.least, len(wish.values) + 1) for wish in wishes)):
        if sum(counts) <= room:
            yield counts


@pytest.mark.parametrize("seconds", [linear, stepped])
@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_commits_more_tokens_a_second(
    seed: int, seconds: Callable[[int], float]
) -> None:
    wishes = drawn_wishes(seed)
    for room in range(sum(wish.least for wish in wishes), 14):
        dealt = tuple(deal_rows(wishes, room, seconds))
        assert dealt in all_ways(wishes, room)
        best = max(tokens_per_s(wishes, counts, seconds) for counts in all_ways(wishes, room))
        assert tokens_per_s(wishes, dealt, seconds) == pytest.approx(best)


def test_no_row_comes_before_those_above_it() -> None:
    """Whatever rounding has made of the chances."""
    wishes = [Wish((1.0, 0.1, 0.9)), Wish((1.0, 0.2))]
    assert deal_rows(wishes, 3, lambda rows: 1.0) == [1, 2]


def test_further_rows_pay_for_what_they_take_on_top_of_a_row_each() -> None:
    """Beyond 4 rows each takes 3 times as long as before. Four plain conversations pay for a plain
    pass of theirs, whatever others draft."""
    costs = RowCosts({1: 1.0, 4: 1.3, 8: 2.5})
    charged = charge(costs, [1, 1, 1, 5], costs.at(8))
    assert charged[:3] == pytest.approx([1.3 / 4] * 3)
    assert charged[3] == pytest.approx(1.3 / 4 + 1.2)
    assert charge(costs, [1, 1, 1, 1], 2 * costs.at(4)) == pytest.approx([1.3 / 2] * 4)
