"""What rounds cost in plain steps, and what a pass costs more after one of another width."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from edge_spec.core.metrics import RoundStats
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget
from edge_spec.scheduler.cost import RoundCosts, RowCosts
from edge_spec.scheduler.policy import plan_rows

SECONDS = {1: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}


def round_of(rows: int, forward_s: float, around_s: float = 0.0, tokens: int = 1) -> RoundStats:
    return RoundStats(
        num_rows=rows,
        num_draft_tokens=rows - 1,
        num_accepted=tokens - 1,
        num_tokens=tokens,
        plain_reason=None,
        near_ties=0,
        draft_s=0.0,
        forward_s=forward_s,
        total_s=forward_s + around_s,
    )


def costs_after(widths: Iterable[int], switch_s: float, around_s: float = 0.0) -> RoundCosts:
    """Of passes of these widths, where one takes `switch_s` more whose width is not that of the
    pass before."""
    found, before = RoundCosts(RowCosts(SECONDS)), 1
    for rows in widths:
        more_s = switch_s if rows != before else 0.0
        found.observe(round_of(rows, SECONDS[rows] + more_s, around_s), 0.0)
        before = rows
    return found


def test_what_a_plain_step_takes_more_after_a_wider_pass_belongs_to_that() -> None:
    found = costs_after([4, 1, 1, 1] * 100, switch_s=0.2)
    assert found.plain_s == pytest.approx(1.0, abs=0.03)
    # Its own graph is built as well: 1.4 + 0.2, and 0.2 for the next step.
    assert found.of(4) == pytest.approx(1.8, abs=0.08)
    assert found.most_lost(4) >= found.of(4) - 1


def test_another_pass_of_the_same_width_takes_no_change() -> None:
    found = costs_after([4, 1, 1, 1] * 100 + [4], switch_s=0.2)
    plain, *_, same, _ = found.further(5)
    assert plain == 0.0
    assert same == pytest.approx(0.4 - 0.2, abs=0.05)  # a plain step would have to change
    assert found.further(3)[2] == pytest.approx(0.3, abs=0.05)
    assert found.of(4) == pytest.approx(1.6, abs=0.08)  # the change back alone


def test_no_width_is_held_after_a_pass_that_others_shared() -> None:
    """Its width was that of all of them."""
    found = costs_after([4, 1, 1, 1] * 100 + [4], switch_s=0.2)
    found.observe(round_of(4, 1.4)._replace(num_sharing=2), 0.0)
    assert found.further(5)[3] == pytest.approx(0.4, abs=0.05)
    assert found.of(4) == pytest.approx(1.6, abs=0.08)


def test_a_width_is_held_while_a_change_costs_more_than_its_spare_rows() -> None:
    """Two draft tokens are worth their rows, the third one is not."""
    tree, reach = TokenTree.chain(1, [2, 3, 4, 5, 6]), [1.0, 0.9, 0.8, 0.02, 0.01, 0.0]
    rows = {}
    for last in (1, 4, 8):
        found = costs_after([4, 1, 1, 1] * 100 + [last], switch_s=0.2)
        plan = plan_rows(tree, reach, Budget(5, 8), found)
        assert plan is not None
        rows[last] = len(plan.tree)
    assert rows == {1: 3, 4: 4, 8: 3}


def test_a_slower_machine_makes_no_round_dearer() -> None:
    """All times are in plain steps of the moment."""
    found = costs_after([1, 1, 4, 1] * 10, switch_s=0.0, around_s=0.1)
    before, slow = found.of(4), {rows: 3 * seconds for rows, seconds in SECONDS.items()}
    for rows in (1, 1, 4, 1):
        step_s = found.observe(round_of(rows, slow[rows], 0.3), 0.0)
        assert step_s == pytest.approx(3.0, rel=0.15)
    assert found.of(4) == pytest.approx(before, rel=0.1)


def test_one_pass_that_was_delayed_tells_how_long_its_round_took_and_no_more() -> None:
    found = costs_after([1, 1, 4, 1] * 10, switch_s=0.0)
    before = found.plain_s
    assert found.observe(round_of(1, 3.0), 0.0) == pytest.approx(3.0, rel=0.15)
    assert found.plain_s == pytest.approx(before, rel=0.03)
