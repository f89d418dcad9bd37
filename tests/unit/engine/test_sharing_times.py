"""What a pass takes: learnt from few, and followed when the machine changes."""

from __future__ import annotations

import pytest

from edge_spec.engine.sharing_times import SharingTimes


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
