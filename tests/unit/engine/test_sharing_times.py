"""What a pass takes: learnt from few, and followed when the machine changes."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.engine.sharing_times import PassTimes, SharingTimes


def observed(fixed_s: float, row_s: float, times: PassTimes, count: int = 64) -> PassTimes:
    rng = np.random.default_rng(0)
    for rows in rng.integers(1, 17, count):
        times.observe(int(rows), (fixed_s + row_s * rows) * rng.uniform(0.97, 1.03))
    return times


def test_the_fixed_part_and_that_of_rows_are_told_apart() -> None:
    times = observed(4e-3, 1e-3, PassTimes())
    assert times.fixed_s == pytest.approx(4e-3, rel=0.25)
    assert times.row_s == pytest.approx(1e-3, rel=0.1)


def test_a_machine_that_slows_down_is_followed() -> None:
    times = observed(4e-3, 1e-3, PassTimes())
    observed(12e-3, 3e-3, times, count=200)
    assert times.at(8) == pytest.approx(36e-3, rel=0.1)


def test_one_pass_that_something_held_up_changes_little() -> None:
    times = observed(4e-3, 1e-3, PassTimes())
    before = times.at(8)
    times.observe(8, 10.0)
    assert times.at(8) < 1.3 * before


@pytest.mark.parametrize("count", [20, 5_000])
def test_passes_of_one_width_leave_half_of_it_fixed(count: int) -> None:
    """Until others tell more, however many there were: not what rounding leaves of them."""
    times = PassTimes()
    for _ in range(count):
        times.observe(2, 10e-3)
    assert times.at(2) == pytest.approx(10e-3, rel=0.02)
    assert times.fixed_s == pytest.approx(5e-3, rel=0.1)


@pytest.mark.parametrize("shared_s, rests", [(8e-3, False), (13e-3, True)])
def test_sharing_rests_where_it_loses(shared_s: float, rests: bool) -> None:
    """Two passes of one row take 10 ms one after the other."""
    times = SharingTimes()
    for rows in (1, 2) * 20:
        times.observe_alone(rows, 4e-3 + rows * 1e-3)
    for _ in range(40):
        if not times.rests:
            times.observe_shared([1, 1], shared_s)
    assert times.rests == rests
    for _ in range(200):
        times.count()
    assert not times.rests


def passes_of_a_rest(times: SharingTimes) -> int:
    """Counts the passes until passes are shared again."""
    passes = 0
    while times.rests:
        times.count()
        passes += 1
        assert passes < 100_000
    return passes


def test_rests_of_sharing_have_an_end_and_begin_short_once_sharing_has_won() -> None:
    """Passes of a busy machine lost a few times: that is not for ever."""
    times = SharingTimes()
    for rows in (1, 2) * 20:
        times.observe_alone(rows, 4e-3 + rows * 1e-3)
    rests = []
    for _ in range(12):
        times.rest()
        rests.append(passes_of_a_rest(times))
    assert rests[:3] == [64, 128, 256] and rests[-2] == rests[-1] == 4096
    for _ in range(8):
        times.observe_shared([1, 1], 8e-3)
    times.rest()
    assert passes_of_a_rest(times) == 64
