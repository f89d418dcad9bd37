"""What the passes of answers took is kept for the next session. All times here are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_spec.core.metrics import RoundStats
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.profile import SECONDS as KEPT
from edge_spec.scheduler.profile import ProfileKey, was_busy
from edge_spec.scheduler.row_findings import RoundTimes

HOW = ProfileKey("", "", "int4", "ort", "1.32", "", 2, (), "a processor")
KEY = replace(HOW, build="abc", features=("X86_V3",), shapes=(1, 2, 3))
SECONDS = {1: 0.010, 2: 0.012, 4: 0.016, 8: 0.024}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))


def round_of(rows: int, seconds: float, num_sharing: int = 1) -> RoundStats:
    return RoundStats(
        num_rows=rows,
        num_draft_tokens=rows - 1,
        num_accepted=0,
        num_tokens=1,
        plain_reason=None,
        near_ties=0,
        draft_s=0.0,
        forward_s=seconds,
        total_s=seconds,
        num_sharing=num_sharing,
    )


def answer(times: RoundTimes, num_rounds: int, factor: float, tokens: int = 100) -> None:
    """Rounds of one and of four rows, in turns."""
    for number in range(num_rounds):
        rows = (1, 4)[number % 2]
        times.observe(round_of(rows, factor * SECONDS[rows]))
    times.end(tokens)
    times.keep()


def kept() -> dict[int, float]:
    return KEPT.known(KEY) or {}


def is_known_to_be_busy() -> bool:
    """As who chooses drafters by these times asks."""
    found = KEPT.read(KEY)
    return found is not None and was_busy(found.disturbance)


def test_widths_that_an_answer_has_seen_are_kept_and_no_others() -> None:
    answer(RoundTimes(KEY), 24, 1.0)
    assert kept() == pytest.approx({rows: SECONDS[rows] for rows in (1, 4)})
    answer(RoundTimes(KEY), 6, 1.0)  # three passes of a width tell nothing
    assert set(kept()) == {1, 4}


def test_what_a_busy_machine_took_is_soon_replaced() -> None:
    times = RoundTimes(KEY)
    for number in range(60):
        times.observe(round_of(1, SECONDS[1] * (1 + 20 * (number % 3))))
    times.end(100)
    times.keep()
    assert is_known_to_be_busy()
    for _ in range(10):
        answer(RoundTimes(KEY), 40, 1.0)
    assert not is_known_to_be_busy()
    assert kept()[1] == pytest.approx(SECONDS[1], rel=0.1)


def test_answers_in_quick_succession_are_written_together() -> None:
    now = 0.0
    together, each = RoundTimes(KEY, clock=lambda: now), RoundTimes(replace(KEY, build="each"))
    for factor in (1.0, 2.0, 2.0):
        for times in (together, each):
            for rows in (1, 4) * 12:
                times.observe(round_of(rows, factor * SECONDS[rows]))
            times.end(100)
        each.keep()
    assert kept() == {}  # each write waits for the disk
    now = 60.0
    for rows in (1, 4) * 12:
        together.observe(round_of(rows, SECONDS[rows]))
    together.end(100)
    found = kept()
    assert set(found) == {1, 4}
    answer(each, 24, 1.0)
    assert found == pytest.approx(KEPT.known(replace(KEY, build="each")))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_of_another_speed_is_taken_up_within_some_answers(factor: float) -> None:
    KEPT.keep(KEY, SECONDS, n=512)
    answer(RoundTimes(KEY), 24, factor)
    one = kept()[1] / SECONDS[1]
    assert 0 < (one - 1) / (factor - 1) < 0.5
    for _ in range(9):
        answer(RoundTimes(KEY), 64, factor)
    assert kept() == pytest.approx({r: factor * s for r, s in SECONDS.items()}, rel=0.1)


def test_slow_passes_among_usual_ones_change_nothing() -> None:
    KEPT.keep(KEY, SECONDS, n=64)
    times = RoundTimes(KEY)
    for number in range(600):  # a third of them had to wait long
        times.observe(round_of(1, SECONDS[1] * (9 if number % 3 == 0 else 1)))
    times.end(100)
    times.keep()
    assert kept() == pytest.approx(SECONDS)


def test_what_is_kept_begins_the_costs_of_the_next_session() -> None:
    """What was not seen follows from the widths that were: the rows are dear here."""
    dear = {1: 0.010, 2: 0.019}
    costs = RowCosts({1: 1.0, 2: 1.2, 4: 1.7, 8: 2.8}, is_measured=False)
    costs.recall(dear)
    assert costs.is_scaled and not costs.is_unsure
    assert costs.at(1) == pytest.approx(dear[1], rel=0.05)
    assert costs.at(2) == pytest.approx(dear[2], rel=0.1)
    assert costs.at(8) > 0.04
    for _ in range(40):  # another machine, or a quiet one by now
        for rows, seconds in ((1, 0.005), (2, 0.0055), (8, 0.012)):
            costs.observe(rows, seconds)
    assert costs.at(8) == pytest.approx(0.012, rel=0.1)
