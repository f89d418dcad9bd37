"""What rounds take around their passes, and what a pass takes more after one of another width."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from edge_spec.core.metrics import RoundStats
from edge_spec.scheduler.cost import RoundSeconds, RowCosts

SECONDS = {1: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}


def round_of(
    rows: int, forward_s: float, around_s: float = 0.0, sharing: int = 1, tokens: int = 1
) -> RoundStats:
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
        num_sharing=sharing,
    )


def seconds_after(widths: Iterable[int], switch_s: float, around_s: float = 0.0) -> RoundSeconds:
    """Of passes of these widths, where one takes `switch_s` more whose width is not that of the
    pass before."""
    found, before = RoundSeconds(RowCosts(SECONDS), RowCosts(SECONDS)), 1
    for rows in widths:
        more_s = switch_s if rows != before else 0.0
        found.observe(round_of(rows, SECONDS[rows] + more_s, around_s), 0.0)
        before = rows
    return found


def test_what_a_plain_step_takes_more_after_a_wider_pass_belongs_to_that() -> None:
    found = seconds_after([4, 1, 1, 1] * 100, switch_s=0.2)
    assert found.plain_s == pytest.approx(1.0, abs=0.03)
    # Its own graph is built as well: 1.4 + 0.2, and 0.2 for the next step.
    assert found.at(4) == pytest.approx(1.8, abs=0.08)
    assert found.most_lost_s(4) >= found.at(4) - found.plain_s


def test_nor_does_it_where_most_plain_steps_come_after_wider_passes() -> None:
    found = seconds_after([4, 1, 4, 1, 4, 1, 1, 1] * 60, switch_s=0.2)
    assert found.plain_s == pytest.approx(1.0, abs=0.03)  # else 1.10


def test_shared_passes_are_learnt_by_themselves() -> None:
    own, shared = RowCosts(SECONDS), RowCosts({1: 0.5, 8: 0.6})
    found = RoundSeconds(own, shared)
    for _ in range(50):
        found.observe(round_of(1, 0.5, sharing=3), 0.0)
    assert found.costs is shared and found.plain_s == pytest.approx(0.5)
    found.observe(round_of(1, 1.0), 0.0)
    assert found.costs is own and found.plain_s == pytest.approx(1.0)
