"""What rows cost, as it was measured and as it changes, and what speculation gains from it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from edge_spec.scheduler.cost import (
    RowCosts,
    expected_tokens,
)
from edge_spec.scheduler.priors import OWN_KERNELS

SECONDS = {1: 1.0, 2: 1.2, 4: 2.0, 8: 2.4}


def test_measured_widths_are_kept_and_others_lie_between_them() -> None:
    costs = RowCosts(SECONDS)
    for rows, seconds in SECONDS.items():
        assert costs.at(rows) == pytest.approx(seconds)
    assert costs.at(3) == pytest.approx(1.6)
    assert costs.at(6) == pytest.approx(2.2)
    assert costs.slope == pytest.approx(1.4 / 7)


# --- drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [2.0, 0.5, 1.3])
def test_a_machine_of_another_speed_is_followed_within_fifty_passes(slower: float) -> None:
    """Whatever passes are seen: all widths become slower together."""
    costs, rng = RowCosts(SECONDS), np.random.default_rng(0)
    for _ in range(50):
        rows = int(rng.integers(1, 9))
        costs.observe(rows, slower * RowCosts(SECONDS).at(rows))
    for rows in (1, 3, 8, 16):
        assert costs.at(rows) == pytest.approx(slower * RowCosts(SECONDS).at(rows), rel=0.05)


@pytest.mark.parametrize("seconds", [1e3, 1e-9, 0.0])
def test_one_pass_that_was_interrupted_hardly_counts(seconds: float) -> None:
    costs = RowCosts(SECONDS)
    costs.observe(1, seconds)
    assert costs.at(1) == pytest.approx(1.0, rel=0.07)
    for _ in range(40):
        costs.observe(1, 1.0)
    assert costs.at(1) == pytest.approx(1.0, rel=0.01)


# --- what speculation gains -------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_expected_tokens_are_leviathans(alpha: float, count: int) -> None:
    """Leviathan et al. 2023, equation 1."""
    expected = (1 - alpha ** (count + 1)) / (1 - alpha)
    assert expected_tokens([alpha] * count) == pytest.approx(expected)


# --- plain and further rows drift apart -------------------------------------------------------


@pytest.mark.parametrize(("first", "further"), [(1.5, 1.0), (1.0, 1.6), (2.0, 1.3), (0.8, 1.2)])
def test_further_rows_may_become_dearer_than_the_first(first: float, further: float) -> None:
    """Say with a long context, or where another process takes what they compute with."""
    costs, rng = RowCosts(SECONDS), np.random.default_rng(1)
    before = RowCosts(SECONDS)
    plain_s = before.at(1)
    for _ in range(50):
        rows = int(rng.choice([1, 1, 2, 4, 8]))
        costs.observe(rows, first * plain_s + further * (before.at(rows) - plain_s))
    assert costs.at(1) == pytest.approx(first * plain_s, rel=0.03)
    assert costs.at(8) - costs.at(1) == pytest.approx(further * (before.at(8) - plain_s), rel=0.15)


def test_padded_passes_cost_what_the_next_width_does() -> None:
    costs = RowCosts(SECONDS)
    padded = costs.padded([2, 4, 8])
    assert [padded.at(rows) for rows in range(1, 9)] == [
        costs.at(rows) for rows in (2, 2, 4, 4, 8, 8, 8, 8)
    ]


def test_the_first_pass_of_a_width_does_not_make_it_dear() -> None:
    """It takes memory and reads code: ten times a pass, say. The second one is believed."""
    costs = RowCosts(SECONDS)
    for _ in range(30):
        costs.observe(1, 1.0)
    costs.observe(4, 20.0)
    assert costs.at(4) == pytest.approx(SECONDS[4], rel=0.01)
    costs.observe(4, 3.0)
    assert costs.at(4) > 1.1 * SECONDS[4]
    expected = costs.at(8)
    costs.observe(8, 1.0)  # faster than expected is believed at once
    assert costs.at(8) < 0.97 * expected


# --- what a slow pass tells ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 2.5, 65, 100])
def test_usual_proportions_hold_for_every_width_once_a_pass_has_told_its_seconds(
    rows: float,
) -> None:
    costs = RowCosts({1: 1.0, 2: 1.1, 16: 2.5}, is_measured=False)
    costs.observe(1, 5e-3)
    measured = RowCosts({1: 5e-3, 2: 5.5e-3, 16: 12.5e-3})
    assert costs.at(rows) == pytest.approx(measured.at(rows))


def test_two_slow_passes_between_quick_plain_steps_make_no_width_dear_but_more_do() -> None:
    """Something else may have computed meanwhile: that is assumed once."""
    costs = RowCosts(SECONDS)
    costs.observe(4, SECONDS[4])
    for _ in range(2):
        costs.observe(4, 3 * SECONDS[4])
    costs.observe(1, SECONDS[1])
    assert costs.at(4) == pytest.approx(SECONDS[4], rel=0.05)
    for _ in range(4):
        costs.observe(4, 3 * SECONDS[4])
        costs.observe(1, SECONDS[1])
    assert costs.at(4) == pytest.approx(3 * SECONDS[4], rel=0.2)


def test_rows_that_seem_dear_are_cheaper_after_many_plain_steps() -> None:
    costs = RowCosts(SECONDS)
    for _ in range(4):
        costs.observe(4, 5 * SECONDS[4])
        costs.observe(1, SECONDS[1])
    assert costs.at(4) > 3 * SECONDS[4]
    for _ in range(1000):
        costs.observe(1, SECONDS[1])
    assert costs.at(4) < 2 * SECONDS[4]


@pytest.mark.parametrize("seed", range(50))
def test_times_of_any_kind_leave_an_uncertainty(seed: int) -> None:
    """Of a machine that becomes slower and faster, and passes that differ many times over."""
    rng = random.Random(seed)
    costs, pace = RowCosts(OWN_KERNELS, is_measured=False), 1.0
    for _ in range(200):
        pace = rng.choice([0.1, 0.5, 1, 2, 5, 10]) if rng.random() < 0.1 else pace
        rows = rng.choice([1, 1, 2, 3, 4, 8])
        costs.observe(rows, pace * (1 + rows / 10) * rng.lognormvariate(0, 0.6))
        assert all(costs.most_further_s(each) > -math.inf for each in OWN_KERNELS)
