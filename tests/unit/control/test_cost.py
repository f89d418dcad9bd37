"""What rows cost, as it was measured and as it changes, and what speculation gains from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.control.cost import (
    RowCosts,
    Scale,
    costs_of,
    expected_tokens,
    experts_touched,
    forecast_speedup,
)
from edge_spec.testing import ScriptedModel, random_logits

SECONDS = {1: 1.0, 2: 1.2, 4: 2.0, 8: 2.4}
MODEL = ScriptedModel(random_logits(9), 9)


def test_measured_widths_are_kept_and_others_lie_between_them() -> None:
    costs = RowCosts(SECONDS)
    for rows, seconds in SECONDS.items():
        assert costs.at(rows) == pytest.approx(seconds)
    assert costs.at(3) == pytest.approx(1.6)
    assert costs.at(6) == pytest.approx(2.2)
    assert costs.slope == pytest.approx(1.4 / 7)


def test_beyond_the_widest_pass_rows_cost_what_the_last_ones_did() -> None:
    costs = RowCosts(SECONDS)
    assert costs.at(12) == pytest.approx(2.8)
    assert costs.at(16) == pytest.approx(3.2)
    assert RowCosts({1: 1.5}).at(9) == pytest.approx(1.5)
    assert RowCosts({1: 1.5}).slope == 0


def test_a_wider_pass_that_was_measured_faster_promises_nothing_beyond_it() -> None:
    """Eight rows may be faster than four, by another kernel or by noise; a hundred are not free."""
    costs = RowCosts({1: 1.0, 4: 2.0, 8: 1.5})
    assert costs.at(6) == pytest.approx(1.75)
    for rows in (8, 9, 16, 20, 1000):
        assert costs.at(rows) == pytest.approx(1.5)
    assert RowCosts({1: 2.0, 8: 1.0}).slope == 0


@pytest.mark.parametrize(("more", "widest"), [(0.0, 1), (0.25, 2), (1.0, 4), (9.0, 8)])
def test_the_widest_pass_that_costs_little_more_than_one_row(more: float, widest: int) -> None:
    assert RowCosts(SECONDS).widest_free(more) == widest


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


def test_noise_is_averaged_out() -> None:
    costs, rng = RowCosts(SECONDS), np.random.default_rng(0)
    for _ in range(400):
        costs.observe(4, 2.0 * rng.uniform(0.8, 1.2))
    # A pass deviates by 0.12; a mean over about 2 * 16 passes by 0.02. Three times that.
    assert costs.at(4) == pytest.approx(2.0, rel=0.06)


# --- mixtures of experts ----------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "used"), [(8, 2), (64, 6), (16, 1), (5, 4)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_experts_touched_is_the_mean_over_independent_choices(
    experts: int, used: int, rows: int
) -> None:
    rng, trials = np.random.default_rng(0), 2000
    counts = [
        len({int(e) for _ in range(rows) for e in rng.permutation(experts)[:used]})
        for _ in range(trials)
    ]
    error = np.std(counts) / trials**0.5
    # Five standard errors; none where every choice touches as many.
    assert experts_touched(rows, experts, used) == pytest.approx(
        np.mean(counts), abs=5 * error + 1e-9
    )


@given(experts=st.integers(2, 256), share=st.floats(0.01, 0.99), rows=st.integers(1, 200))
def test_rows_never_touch_more_experts_than_there_are(
    experts: int, share: float, rows: int
) -> None:
    used = max(1, int(share * experts))
    touched = experts_touched(rows, experts, used)
    assert used - 1e-9 <= touched <= min(experts, rows * used) + 1e-9
    assert touched <= experts_touched(rows + 1, experts, used) + 1e-9


def test_a_mixtures_time_follows_its_experts_between_and_beyond_the_measured_widths() -> None:
    """Two of eight experts a row, 0.1 s each and 0.5 s for all else."""

    def truth(rows: float) -> float:
        return 0.5 + 0.1 * experts_touched(rows, 8, 2)

    measured = {width: truth(width) for width in (1, 2, 8)}
    config = replace(MODEL.config, num_experts=8, experts_used=2)
    mixture = costs_of(config, measured)
    for rows in (1, 2, 3, 4, 6, 8, 12, 32):
        assert mixture.at(rows) == pytest.approx(truth(rows))
    assert mixture.at(1000) < 0.5 + 0.1 * 8 + 1e-9
    # As if it were dense, the rows between would be underrated and those beyond overrated.
    dense = costs_of(MODEL.config, measured)
    assert dense.at(4) < truth(4) and dense.at(32) > truth(32) + 0.3


def test_a_mixture_that_uses_all_of_its_experts_is_dense() -> None:
    for experts, used in ((0, 0), (8, 8), (8, 0)):
        assert RowCosts(SECONDS, experts, used).at(3) == pytest.approx(1.6)


# --- what speculation gains -------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_expected_tokens_are_leviathans(alpha: float, count: int) -> None:
    """Leviathan et al. 2023, equation 1."""
    expected = (1 - alpha ** (count + 1)) / (1 - alpha)
    assert expected_tokens([alpha] * count) == pytest.approx(expected)


def test_expected_tokens_of_unequal_draft_tokens() -> None:
    assert expected_tokens([0.5, 0.4, 1.0]) == pytest.approx(1 + 0.5 + 0.2 + 0.2)
    assert expected_tokens([0.0, 1.0]) == 1


@pytest.mark.parametrize(
    ("alpha", "c", "count", "speedup"),
    [(0.6, 0.05, 4, 1.92), (0.8, 0.1, 6, 2.47), (0.9, 0.2, 6, 2.37), (0.6, 0.4, 1, 1.14)],
)
def test_the_forecast_is_leviathans_where_rows_are_free(
    alpha: float, c: float, count: int, speedup: float
) -> None:
    """Theorem 3.8 of the paper, for a step of the draft that takes `c` of the target's."""
    free = RowCosts({1: 2.0, 16: 2.0})
    assert forecast_speedup([alpha] * count, free, count * c * 2.0) == pytest.approx(
        speedup, abs=0.006
    )


def test_the_forecast_counts_what_the_targets_rows_cost() -> None:
    costs = RowCosts({1: 1.0, 5: 2.0})
    assert forecast_speedup([1.0] * 4, costs, 0.5) == pytest.approx(5 / 2.5)
    assert forecast_speedup([], costs, 0.0) == pytest.approx(1.0)


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


@pytest.mark.parametrize("rows", [1, 8])
def test_where_one_width_was_seen_the_others_follow_it(rows: int) -> None:
    """The better of two draft tokens: most of what slows one pass down slows all of them down."""
    costs, before = RowCosts(SECONDS), RowCosts(SECONDS)
    for _ in range(100):
        costs.observe(rows, 1.5 * before.at(rows))
    for width in (1, 4, 8):
        assert costs.at(width) == pytest.approx(1.5 * before.at(width), rel=0.05)


def test_further_rows_are_those_on_top_of_the_first() -> None:
    costs = RowCosts(SECONDS)
    for _ in range(20):
        costs.observe(4, 3 * costs.at(4))
    expected = [costs.at(rows) - costs.at(1) for rows in range(1, 100)]
    assert costs.further(99) == pytest.approx(expected)
    assert costs.further(5) == pytest.approx(expected[:5])


def test_padded_passes_cost_what_the_next_width_does() -> None:
    costs = RowCosts(SECONDS)
    padded = costs.padded([2, 4, 8])
    assert [padded.at(rows) for rows in range(1, 9)] == [
        costs.at(rows) for rows in (2, 2, 4, 4, 8, 8, 8, 8)
    ]


def test_rows_that_were_measured_on_a_busy_machine_are_hoped_to_be_cheaper() -> None:
    """Until a pass has some, when what it took is what they are taken to cost."""
    costs = RowCosts({1: 2.5, 2: 4.0, 4: 6.0, 8: 10.0})
    for _ in range(40):
        costs.observe(1, 1.0)
    assert costs.is_outdated
    assert costs.at(2) - costs.at(1) == pytest.approx(0.25 * 1.5 / 2.5, rel=0.1)
    for _ in range(3):
        costs.observe(2, 1.12)
    assert costs.at(2) == pytest.approx(1.12, rel=0.05)


def test_a_machine_that_is_slower_than_measured_is_not_hoped_for() -> None:
    costs = RowCosts(SECONDS)
    for _ in range(40):
        costs.observe(1, 3 * SECONDS[1])
    assert not costs.is_outdated
    assert costs.at(2) == pytest.approx(3 * SECONDS[2], rel=0.05)


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


def test_costs_of_usual_proportions_learn_a_width_by_itself() -> None:
    """A kernel that works in fours makes four rows cheaper than two."""
    costs = RowCosts({1: 1.0, 2: 1.15, 4: 1.5, 8: 2.3}, scale=Scale(is_known=False))
    for _ in range(8):
        costs.observe(1, 0.01)
    assert costs.deviation_s(4) > 0.1 * costs.at(4)
    for _ in range(12):
        costs.observe(1, 0.01)
        costs.observe(2, 0.016)
        costs.observe(4, 0.012)
    assert costs.at(2) == pytest.approx(0.016, rel=0.07)
    assert costs.at(4) == pytest.approx(0.012, rel=0.07)
    assert costs.deviation_s(4) < 0.08 * costs.at(4)
