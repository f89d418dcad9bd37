"""Rates, speedups and their intervals, against cases that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.diagnostics.bench.report import Paired, prompt_speedups, speedup


def paired(
    seconds: list[list[float]], base_seconds: list[list[float]], tokens: float = 100.0
) -> Paired:
    shape = np.shape(seconds)
    counts = np.full(shape, tokens)
    return Paired(np.stack([counts, seconds, counts, base_seconds]))


def test_long_answers_weigh_more_than_short_ones() -> None:
    tokens = [[100.0], [10.0]]
    measured = Paired(np.array([tokens, [[1.0], [1.0]], tokens, [[2.0], [1.0]]]))
    assert measured.rate == 110 / 2
    assert measured.base_rate == 110 / 3
    assert speedup([measured]).value == pytest.approx(1.5)  # not the mean of 2 and 1, nor of rates


def test_the_interval_is_that_of_the_bootstrap() -> None:
    # Of two prompts, half of all draws hold both, a quarter each of them twice.
    interval = speedup([paired([[1.0], [1.0]], [[1.0], [3.0]])])
    assert interval == pytest.approx((2.0, 1.0, 3.0))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        ratios = random.normal(1.5, 0.3, (40, 1))
        _, low, high = speedup([paired(np.ones((40, 1)).tolist(), ratios.tolist())], seed=trial)
        covered += low <= 1.5 <= high
    assert 85 <= covered <= 99  # the percentile bootstrap of 40 is a little narrow


def test_a_prompts_interval_is_the_range_of_its_pairs() -> None:
    measured = paired([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]], [[1.1, 1.3, 1.2], [2.0, 4.0, 2.0]])
    first, second = prompt_speedups(measured)
    assert first == pytest.approx((1.2, 1.1, 1.3))
    assert second == pytest.approx((2.0, 2.0, 2.0))  # its second pair was slow on both sides
