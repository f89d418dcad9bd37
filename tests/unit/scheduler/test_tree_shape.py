"""The best static tree is the best of all trees."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget
from edge_spec.scheduler import policy
from edge_spec.scheduler.cost import RoundCosts, RowCosts
from edge_spec.scheduler.policy import best_shape, plan_rows

MOST_ROWS = 7


def all_trees(num_rows: int) -> Iterator[tuple[int, ...]]:
    """Every tree, as the parents of its rows; most of them several times, by other numberings."""
    for parents in product(*(range(row) for row in range(1, num_rows))):
        yield (-1, *parents)


ALL_TREES = [tree for rows in range(2, MOST_ROWS + 1) for tree in all_trees(rows)]


def depth_of(shape: tuple[int, ...]) -> int:
    depths = [0]
    for parent in shape[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def expected_of(shape: tuple[int, ...], acceptance: list[float]) -> float | None:
    """Tokens of a round; None where a row has more children than there is acceptance for."""
    reach, ranks = [1.0], [0] * len(shape)
    for parent in shape[1:]:
        if ranks[parent] == len(acceptance):
            return None
        reach.append(reach[parent] * acceptance[ranks[parent]])
        ranks[parent] += 1
    return sum(reach)


def best_rate(
    acceptance: list[float], costs: RowCosts, pass_s: float, max_rows: int, max_depth: int
) -> float:
    rates = [1 / costs.at(1)]
    for shape in ALL_TREES:
        depth, expected = depth_of(shape), expected_of(shape, acceptance)
        if expected is not None and len(shape) <= max_rows and depth <= max_depth:
            rates.append(expected / (costs.at(len(shape)) + depth * pass_s))
    return max(rates)


steps = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.0]), min_size=6, max_size=6)


@given(
    acceptance=st.lists(st.floats(0, 0.6), min_size=1, max_size=4).filter(lambda a: sum(a) <= 1),
    steps=steps,
    pass_s=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    max_rows=st.integers(2, MOST_ROWS),
    max_depth=st.integers(1, 6),
)
def test_no_tree_commits_more_tokens_a_second(
    acceptance: list[float], steps: list[float], pass_s: float, max_rows: int, max_depth: int
) -> None:
    """Held against every tree of up to seven rows, on costs with steps."""
    seconds = 1 + np.cumsum([0.0, *steps])
    costs = RowCosts({rows: float(s) for rows, s in enumerate(seconds, start=1)})
    shape = best_shape(acceptance, costs, pass_s, max_rows, max_depth)
    expected = expected_of(shape, acceptance)
    assert expected is not None and len(shape) <= max_rows and depth_of(shape) <= max_depth
    assert shape[0] == -1
    assert all(0 <= parent < row for row, parent in enumerate(shape[1:], start=1))
    rate = expected / (costs.at(len(shape)) + depth_of(shape) * pass_s)
    best = best_rate(acceptance, costs, pass_s, max_rows, max_depth)
    assert rate == pytest.approx(best, rel=1e-9)  # sums in another order


@pytest.mark.parametrize(
    ("acceptance", "seconds", "pass_s"),
    [
        ([0.0, 0.0], {1: 1.0, 8: 1.1}, 0.01),  # nothing is right
        ([0.9], {1: 1.0, 8: 1.1}, 1.5),  # the draft is slower than its target
        ([0.5], {1: 1.0, 2: 2.0, 8: 8.0}, 0.0),  # a row costs as much as a plain step
        ([], {1: 1.0, 8: 1.1}, 0.01),
    ],
)
def test_nothing_is_drafted_where_nothing_pays(
    acceptance: list[float], seconds: dict[int, float], pass_s: float
) -> None:
    assert best_shape(acceptance, RowCosts(seconds), pass_s, 16, 8) == (-1,)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_rows_of_a_tree_are_chosen_by_what_came_of_draft_tokens_like_them(chance: float) -> None:
    """Their drafter says that each is right in half of the cases."""
    tree = TokenTree(
        np.arange(5, dtype=np.int32),
        np.array([-1, 0, 0, 1, 2], np.int32),
        np.array([1.0, 0.5, 0.5, 0.5, 0.5], np.float32),
    )
    reach = [1.0, 0.04, chance, 0.03, chance * chance]
    plan = plan_rows(tree, reach, Budget(15, 16), RoundCosts(RowCosts({1: 1.0, 16: 2.5})))
    assert plan is not None
    expected = [0, 2, 4] if chance > 0.4 else [0, 2]
    assert plan.tree.tokens.tolist() == expected


def test_the_first_rows_of_a_planned_tree_are_its_likeliest_ones() -> None:
    """A pass that others share may score no more of it."""
    tree = TokenTree(
        np.array([0, 1, 2, 3, 4], np.int32),
        np.array([-1, 0, 0, 2, 1], np.int32),
        np.array([1.0, 0.3, 0.6, 0.9, 0.9], np.float32),
    )
    reach = [1.0, 0.3, 0.6, 0.54, 0.27]
    plan = plan_rows(tree, reach, Budget(15, 16), RoundCosts(RowCosts({1: 1.0, 16: 1.1})))
    assert plan is not None
    assert plan.tree.tokens.tolist() == [0, 2, 3, 1, 4]
    assert plan.tree.parents.tolist() == [-1, 0, 1, 0, 3]
    assert plan.values == (1.0, 0.6, 0.54, 0.3, 0.27)


def test_the_search_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs between two rounds. Counted in forests, which no busy machine changes: some 1,000,
    a few milliseconds; without its memory it would be billions."""
    calls, best_forest = 0, policy._Gain._best_forest

    def counted(self: policy._Gain, *of: int) -> tuple[float, int]:
        nonlocal calls
        calls += 1
        assert calls < 5_000
        return best_forest(self, *of)

    monkeypatch.setattr(policy._Gain, "_best_forest", counted)
    shape = best_shape([0.5, 0.2, 0.1, 0.05], RowCosts({1: 1.0, 8: 1.3}), 0.05, 16, 8)
    assert len(shape) > 4
    assert calls > 100
