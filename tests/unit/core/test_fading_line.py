"""A line through points of which the older ones count less, against numpy's own least squares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.fading_line import FadingLine

POINT = st.tuples(st.floats(0, 20), st.floats(0, 50))


@given(points=st.lists(POINT, min_size=1, max_size=30), remembered=st.floats(0.5, 1.0))
def test_it_is_the_line_of_weighted_least_squares(
    points: list[tuple[float, float]], remembered: float
) -> None:
    line = FadingLine(remembered)
    for x, y in points:
        line.observe(x, y)
    root, weight = -3.0, 0.1
    roots = np.sqrt([*(remembered**age for age in reversed(range(len(points)))), weight])
    xs, ys = np.array([*points, (root, 0.0)]).T
    expected, *_ = np.linalg.lstsq(np.stack([roots, roots * xs], axis=1), roots * ys, rcond=None)
    # Float64: sums of squares lose half of its 16 digits where all points have nearly one x.
    found = line.fit(root, weight, least_slope=-np.inf)
    assert found == pytest.approx(tuple(expected), rel=1e-5, abs=1e-5)
    intercept, slope = line.fit(root, weight)
    assert slope == max(0.0, found[1])
    mean_x = (roots**2 @ xs) / (roots @ roots)
    assert intercept + slope * mean_x == pytest.approx((roots**2 @ ys) / (roots @ roots), abs=1e-9)
