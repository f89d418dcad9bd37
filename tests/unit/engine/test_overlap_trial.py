"""Whether overlap is kept, by the times of rounds with it and without."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from edge_spec.core.metrics import DraftCounts, NoOverlap, PlainReason, RoundStats
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


def test_what_makes_no_difference_is_left_out() -> None:
    ways = run(OverlapTrial(), lambda on, draft_tokens, number: 1.0 + draft_tokens, 2000)
    assert ways[200:].count(True) < 0.1 * 1800


@pytest.mark.parametrize("with_it", [0.99, 1.02])
def test_what_was_faster_is_kept_until_the_other_way_is(with_it: float) -> None:
    """Differences that are smaller than those between texts change nothing."""
    trial = OverlapTrial()
    assert run(trial, lambda on, draft_tokens, number: 0.8 if on else 1.0, 400)[-1]
    ways = run(trial, lambda on, draft_tokens, number: with_it if on else 1.0, 2000)
    assert ways.count(True) > 0.9 * 2000


def test_draft_tokens_that_are_ready_in_some_rounds_count_as_often_as_they_are() -> None:
    """Ready in two rounds of five, which then take half as long: 20 % faster on the whole, and the
    median round is no faster."""
    random = Random(3)

    def seconds(on: bool, draft_tokens: int, number: int) -> float:
        return 0.5 if on and random.random() < 0.4 else 1.0

    assert run(OverlapTrial(), seconds, 600)[200:].count(True) > 0.9 * 400


def test_more_draft_tokens_a_round_are_not_taken_for_a_slower_way() -> None:
    """Times are compared at the same number of draft tokens: overlap makes more of them pay."""
    trial, random = OverlapTrial(), Random(4)
    ways = []
    for _ in range(600):
        draft_tokens = random.randint(3, 6) if trial.on else random.randint(1, 4)
        ways.append(trial.on)
        trial.observe(round_stats((1 + draft_tokens) * (0.85 if trial.on else 1.0), draft_tokens))
    assert ways[200:].count(True) > 0.9 * 400


def test_it_changes_its_mind_when_the_machine_does() -> None:
    trial = OverlapTrial()
    assert run(trial, noisy(0.8), 400)[-1]
    late = run(trial, noisy(1.4), 4000)[2500:]
    assert late.count(False) > 0.9 * len(late)


def test_the_first_round_of_a_block_belongs_to_none() -> None:
    """Its draft tokens were made, or not, in the block before."""
    trial = OverlapTrial()
    way, since = trial.on, 0
    for _ in range(200):
        since = since + 1 if trial.on is way else 0
        way = trial.on
        trial.observe(round_stats(100.0 if not since else (0.5 if way else 1.0), 2))
    assert not any(100.0 in times for kinds in trial._seconds.values() for times in kinds.values())


def test_plain_rounds_tell_nothing() -> None:
    trial = OverlapTrial()
    for _ in range(100):
        trial.observe(round_stats(1.0, 0, plain=True))
        assert trial.on
    assert not any(trial._seconds.values())


def test_the_same_times_lead_to_the_same_choices() -> None:
    runs = [run(OverlapTrial(), noisy(0.97), 500) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_trial_that_begins_without_it_says_why_and_still_finds_out_that_it_is_faster() -> None:
    trial = OverlapTrial(begins=False)
    assert not trial.on and trial.why_not is NoOverlap.SLOWER
    ways = run(trial, lambda on, draft_tokens, number: 1.0 - 0.3 * on, 2000)
    assert not any(ways[:100]) and ways[-400:].count(True) > 0.9 * 400


def test_rounds_of_a_comparison_are_told_from_those_of_a_slower_way() -> None:
    trial = OverlapTrial()
    assert trial.why_not is None
    run(trial, lambda on, draft_tokens, number: 1.0 + 0.3 * on, 8)
    assert trial.why_not is NoOverlap.COMPARISON
    run(trial, lambda on, draft_tokens, number: 1.0 + 0.3 * on, 292)
    assert trial.why_not is NoOverlap.SLOWER
