"""What is counted as accepted, and what it is forecast to bring."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.control.cost import RowCosts
from edge_spec.distill.acceptance import (
    Acceptance,
    best_chain,
    measured_acceptance,
    written_after,
)

TEXT = np.array([10, 11, 12, 13, 14], np.int32)


def test_draft_tokens_are_held_against_those_after_the_pending_one() -> None:
    """From place 0 token 11 is pending, and 12 is the first that is drafted."""
    found = written_after(TEXT, np.array([0, 2, 3]), 3)
    assert found.tolist() == [[12, 13, 14], [14, -1, -1], [-1, -1, -1]]


def test_a_position_counts_only_after_all_before_it() -> None:
    written = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    found = measured_acceptance([(drafts[:2], written[:2]), (drafts[2:], written[2:])])
    assert found.of_position == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert found.num_drafts == 4
    assert found.tokens_a_round == pytest.approx(1 + 3 / 4 + 2 / 4 + 1 / 4)


def test_what_the_target_did_not_write_any_more_is_neither_right_nor_wrong() -> None:
    written = np.array([[1, -1], [1, 2]])
    found = measured_acceptance([(np.array([[1, -1], [1, 2]]), written)])
    assert found.of_position == (1.0, 1.0)  # one half, were the end counted against it


def test_the_forecast_takes_the_chain_that_pays_most() -> None:
    costs = RowCosts({1: 10.0, 2: 11.0, 3: 12.0, 4: 30.0})
    found = best_chain(Acceptance((0.5, 0.5, 0.9), 100), costs, lambda count: 0.5 * count)
    assert found.num_draft_tokens == 2
    assert found.speedup == pytest.approx((1 + 0.5 + 0.25) * 10 / (12 + 1))
    assert found.pays


def test_a_drafter_that_is_never_right_does_not_pay() -> None:
    costs = RowCosts({1: 10.0, 2: 11.0})
    found = best_chain(Acceptance((0.0,), 100), costs, lambda count: 1.0)
    assert not found.pays and found.speedup == pytest.approx(10 / 12)
