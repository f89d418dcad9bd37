"""What is counted as accepted, and what it is forecast to bring."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.distill.forecast import Acceptance, best_chain, measure_acceptance
from edge_spec.scheduler.cost import RowCosts


def test_a_position_counts_only_after_all_before_it() -> None:
    written = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    found = measure_acceptance([(drafts[:2], written[:2]), (drafts[2:], written[2:])])
    assert found.of_position == pytest.approx((3 / 4, 2 / 3, 1 / 2))


def test_what_the_target_did_not_write_any_more_is_neither_right_nor_wrong() -> None:
    written = np.array([[1, -1], [1, 2]])
    found = measure_acceptance([(np.array([[1, -1], [1, 2]]), written)])
    assert found.of_position == (1.0, 1.0)  # one half, were the end counted against it


def test_rounds_begin_where_the_one_before_ended() -> None:
    """With a draft token each, four rounds begin at the places 0, 2, 4 and 5. From every place, two
    thirds of first draft tokens are right, which would be 1.67 tokens a round."""
    written = np.array([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, -1]])
    drafts = np.array([[1, 9], [9, 9], [3, 4], [4, 9], [9, 9], [6, 7]])
    found = measure_acceptance([(drafts, written)])
    assert found.of_position[0] == pytest.approx(4 / 6)
    assert found.tokens_a_step == pytest.approx((6 / 4, 6 / 3))
    twice = measure_acceptance([(drafts[:3], written[:3]), (drafts[3:], written[3:])])
    assert twice.tokens_a_step == pytest.approx((6 / 4, 6 / 4))  # a round ends with its text


def test_the_forecast_takes_the_chain_that_pays_most() -> None:
    costs = RowCosts({1: 10.0, 2: 11.0, 3: 12.0, 4: 30.0})
    accepted = Acceptance((0.5, 0.5, 0.9), (1.5, 1.75, 1.9))
    found = best_chain(accepted, costs, 0.5)
    assert found.num_draft_tokens == 2
    assert found.speedup == pytest.approx(1.75 * 10 / (12 + 1))


def test_no_forecast_is_beyond_the_tokens_of_a_round() -> None:
    """Where noise made a pass of one row dearer than one of two."""
    costs = RowCosts({1: 15.0, 2: 2.6, 4: 11.0})
    accepted = Acceptance((0.03, 0.0, 0.0), (1.03, 1.03, 1.03))
    found = best_chain(accepted, costs, 0.4)
    assert found.num_draft_tokens == 1
    assert found.speedup == pytest.approx(1.03 * 2.6 / (2.6 + 0.4))
