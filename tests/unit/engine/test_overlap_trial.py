"""Whether overlap is kept, by the times of rounds with it and without."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from edge_spec.core.metrics import DraftCounts, PlainReason, RoundStats
from edge_spec.engine.draft_overlap import OverlapTrial

Seconds = Callable[
    [bool, int, int], float
]  # of a round: with it or not, its draft tokens, its number


def round_stats(seconds: float, draft_tokens: int, plain: bool = False) -> RoundStats:
    return RoundStats(
        num_rows=1 + draft_tokens,
        num_draft_tokens=draft_tokens,
        num_accepted=0,
        num_tokens=1,
        plain_reason=PlainReason.NO_CANDIDATE if plain else None,
        near_ties=0,
        draft_s=0.0,
        forward_s=seconds,
        total_s=seconds,
        by_drafter={"draft-model": DraftCounts(draft_tokens, 0)},
    )


def run(trial: OverlapTrial, seconds: Seconds, rounds: int, seed: int = 1) -> list[bool]:
    """Which rounds had it."""
    random, ways = Random(seed), []
    for number in range(rounds):
        draft_tokens = random.randint(1, 4)
        ways.append(trial.on)
        trial.observe(round_stats(seconds(trial.on, draft_tokens, number), draft_tokens))
    return ways


def noisy(with_it: float, seed: int = 2) -> Seconds:
    """Times by draft tokens, `with_it` times as long with overlap, and some of them far off."""
    random = Random(seed)

    def seconds(on: bool, draft_tokens: int, number: int) -> float:
        factor = random.gauss(1.0, 0.05) * (30.0 if random.random() < 0.02 else 1.0)
        return (1.0 + draft_tokens) * (with_it if on else 1.0) * abs(factor)

    return seconds


@pytest.mark.parametrize(
    ("with_it", "kept"), [(0.8, True), (0.9, True), (1.1, False), (1.3, False)]
)
def test_the_faster_way_is_kept_and_the_other_is_tried_now_and_then(
    with_it: float, kept: bool
) -> None:
    ways = run(OverlapTrial(), noisy(with_it), 2000)
    late = ways[400:]
    assert 0.02 < late.count(not kept) / len(late) < 0.1


@pytest.mark.parametrize("with_it", [0.99, 1.02])
def test_what_was_faster_is_kept_until_the_other_way_is(with_it: float) -> None:
    """Differences that are smaller than those between texts change nothing."""
    trial = OverlapTrial()
    assert run(trial, lambda on, draft_tokens, number: 0.8 if on else 1.0, 400)[-1]
    ways = run(trial, lambda on, draft_tokens, number: with_it if on else 1.0, 2000)
    assert ways.count(True) > 0.9 * 2000


def test_it_changes_its_mind_when_the_machine_does() -> None:
    trial = OverlapTrial()
    assert run(trial, noisy(0.8), 400)[-1]
    late = run(trial, noisy(1.4), 4000)[2500:]
    assert late.count(False) > 0.9 * len(late)
