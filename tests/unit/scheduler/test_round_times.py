"""What passes take is learnt from the rounds of answers: kept where nothing was known, and in place
of what many rounds contradict. All times here are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.core.metrics import RoundStats
from edge_spec.scheduler.profile import ProfileKey
from edge_spec.scheduler.row_findings import SECONDS as KEPT
from edge_spec.scheduler.row_findings import RoundTimes, RowsKey

HOW = ProfileKey("", "", "int4", "ort", "1.32", "", 2, (), "a processor")
KEY = RowsKey(HOW, "abc", ("X86_V3",), (1, 2, 3))
SHARES = {1: 1.0, 2: 1.2, 4: 1.7, 8: 2.8}
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


def test_a_first_answer_beside_much_else_tells_nothing() -> None:
    times = RoundTimes(KEY, SHARES)
    for number in range(24):
        times.observe(round_of(1, SECONDS[1] * (1 + 20 * (number % 3))))
    times.end(100)
    assert KEPT.known(KEY) is None


@pytest.mark.parametrize(
    ("factor", "num_rounds", "is_replaced"),
    [
        (0.5, 64, True),  # it was measured beside something else
        (0.5, 20, False),  # of which a few rounds say nothing
        (0.9, 512, False),
        (1.3, 512, False),  # a text is longer than that of the measurement
        (2.0, 128, False),  # the machine may be busy now
        (2.0, 520, True),  # it is not that machine any more
    ],
)
def test_what_many_rounds_contradict_is_replaced(
    factor: float, num_rounds: int, is_replaced: bool
) -> None:
    KEPT.keep(KEY, SECONDS)
    answer(RoundTimes(KEY, SHARES), num_rounds, factor)
    expected = {rows: seconds * (factor if is_replaced else 1) for rows, seconds in SECONDS.items()}
    assert KEPT.known(KEY) == pytest.approx(expected)


def test_slow_passes_among_usual_ones_replace_nothing() -> None:
    KEPT.keep(KEY, SECONDS)
    times = RoundTimes(KEY, SHARES)
    for number in range(600):  # a third of them had to wait long
        times.observe(round_of(1, SECONDS[1] * (9 if number % 3 else 1)))
    times.end(100)
    assert KEPT.known(KEY) == pytest.approx(SECONDS)
