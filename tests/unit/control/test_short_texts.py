"""What a policy loses in texts where a draft does not pay, and gains in those between where it
does.

Simulated: a plain round takes 1.05 seconds, a draft token 0.1 to 0.3, a further row 0.12. Each mix
is drawn and decoded with four seeds, 150 texts each, the first of which nothing is known about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.backoff import Backoff, TextGains
from edge_spec.drafters.protocol import Budget
from fixtures.costly_drafts import Clock, DraftingAtCost, pass_s, policy_of, stats_of

_AROUND_S = 0.05  # of a round, outside drafting and the pass
_SEEDS, _TEXTS = 4, 150


class Kind(NamedTuple):
    """Of text: the share of draft tokens that are right, and its tokens."""

    right: float
    tokens: int


GOOD, BAD = Kind(0.9, 10), Kind(0.2, 10)
LONG_GOOD, LONG_BAD = Kind(0.9, 100), Kind(0.2, 100)
MIXES = {
    "mixed": (GOOD, BAD, LONG_GOOD, LONG_BAD),
    "short": (GOOD, BAD),
    "mostly good": (GOOD, GOOD, GOOD, GOOD, BAD),
    "mostly bad": (BAD, BAD, BAD, BAD, GOOD),
    "fair": (Kind(0.7, 10),),
    "poor": (Kind(0.3, 10),),
}


def answer(
    clock: Clock, policy: AdaptivePolicy, draft: DraftingAtCost, tokens: int
) -> tuple[int, float]:
    """Tokens of one text, with those that its last round has beyond its end, and seconds."""
    start_s, written = clock.now, 0
    policy.begin()
    while written < tokens:
        round_s = clock.now
        plan = policy.choose([draft], 0, Budget(min(15, tokens - written - 1), 16))
        drafted_s, rows = clock.now, len(plan.tree)
        clock.now += pass_s(rows) + _AROUND_S
        accepted = draft.outcome(rows - 1)
        times = (drafted_s - round_s, pass_s(rows), clock.now - round_s)
        policy.observe(stats_of(plan, accepted, *times))
        written += accepted + 1
    return written, clock.now - start_s


def speeds(mix: str, draft_token_s: float) -> Mapping[Kind | None, float]:
    """Over plain decoding: of each kind of text, and of all (None)."""
    tokens: dict[Kind | None, int] = defaultdict(int)
    seconds: dict[Kind | None, float] = defaultdict(float)
    for seed in range(_SEEDS):
        draws, clock = np.random.default_rng(seed), Clock()
        draft = DraftingAtCost(clock, draft_token_s, 0.0)
        policy = policy_of(clock, {"draft": draft_token_s})
        for which in draws.integers(len(MIXES[mix]), size=_TEXTS):
            kind = MIXES[mix][which]
            draft.is_right_in(kind.right)
            found, taken_s = answer(clock, policy, draft, kind.tokens)
            for each in (kind, None):
                tokens[each] += found
                seconds[each] += taken_s
    return {kind: tokens[kind] * (1 + _AROUND_S) / seconds[kind] for kind in tokens}


@pytest.mark.parametrize(
    ("mix", "draft_token_s", "least_of_bad", "least"),
    [
        # Judged by all texts alike, the bad ones had 0.91, 0.94, 0.89, 0.88, 0.77 and 0.73, and all
        # of them 1.08, 1.04, 1.12, 1.03, 1.52 and 1.25 (test below). The bounds are two standard
        # deviations over seeds, 0.02, below what is reached.
        ("mixed", 0.1, 0.94, 1.26),
        ("mixed", 0.2, 0.92, 1.18),
        ("short", 0.1, 0.95, 1.15),
        ("short", 0.2, 0.92, 1.11),
        ("mostly good", 0.1, 0.93, 1.55),
        ("mostly good", 0.2, 0.88, 1.38),
    ],
)
def test_a_text_in_which_a_draft_does_not_pay_loses_little(
    mix: str, draft_token_s: float, least_of_bad: float, least: float
) -> None:
    found = speeds(mix, draft_token_s)
    assert found[BAD] >= least_of_bad
    assert found[None] >= least


@pytest.mark.parametrize("draft_token_s", [0.1, 0.2])
@pytest.mark.parametrize("mix", ["fair", "poor", "mostly bad"])
def test_texts_that_are_alike_or_mostly_bad_lose_nothing_by_it(
    mix: str, draft_token_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same policy that judges every text by all of them alike."""
    found = speeds(mix, draft_token_s)
    monkeypatch.setattr("edge_spec.control.backoff.FEWEST_TEXTS", float("inf"))
    before = speeds(mix, draft_token_s)
    assert found[None] >= 0.99 * before[None]


def test_without_it_short_texts_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bounds above are held against, so that they say something."""
    monkeypatch.setattr("edge_spec.control.backoff.FEWEST_TEXTS", float("inf"))
    found = speeds("mostly good", 0.2)
    assert found[BAD] < 0.8 and found[None] < 1.3


def gains_of(*texts: list[float]) -> TextGains:
    gains = TextGains()
    for text in texts:
        for gain in text:
            gains.observe(gain)
        gains.begin_text()
    return gains


def test_where_texts_differ_two_lost_rounds_are_enough() -> None:
    gains = gains_of(*[[2.0, 2.5, 1.5], [-0.4, -0.3]] * 4)
    assert gains.weight < 2
    limits = [gains.draft_tokens(0.3)]
    for _ in range(4):
        gains.observe(-0.5)
        limits.append(gains.draft_tokens(0.3))
    assert gains.is_losing
    assert limits[0] == 1 and sorted(limits, reverse=True) == limits


def test_draft_tokens_that_cost_nothing_are_not_limited() -> None:
    """Measured on a busy machine, more rows may take no longer than one."""
    gains = gains_of(*[[2.0, 2.5, 1.5], [-0.4, -0.3]] * 4)
    assert gains.draft_tokens(0.0) > 1000


def test_where_texts_are_alike_a_text_is_judged_by_all() -> None:
    gains = gains_of(*[[1.0, -0.4, 0.9, -0.3]] * 6)
    for _ in range(8):
        gains.observe(-0.4)
    assert gains.weight == 40 and not gains.is_losing
    assert gains.draft_tokens(0.3) > 2


def test_nothing_is_said_of_few_texts_or_where_most_lose() -> None:
    for texts in (1 * [[2.0, -0.4]], 8 * [[-0.3, -0.4]]):
        gains = gains_of(*texts)
        for _ in range(9):
            gains.observe(-1.0)
        assert not gains.is_losing
        assert gains.draft_tokens(0.3) > 1000


def test_a_rest_that_a_text_has_earned_ends_with_it() -> None:
    backoff = Backoff(0.2)
    for number in range(10):
        backoff.begin_text()
        for gain in ([2.0] * 4, [-0.4] * 2)[number % 2]:
            backoff.observe(1.0, 1 + round(gain), 1.0) if gain > 0 else backoff.unused(0.4, 1.0)
    backoff.begin_text()
    assert not backoff.resting
    for _ in range(9):
        backoff.unused(0.4, 1.0)
    assert backoff.resting
    backoff.begin_text()
    assert not backoff.resting


def test_a_rest_that_all_texts_have_earned_goes_on() -> None:
    backoff = Backoff(0.2, first_loss=2.0)
    for _ in range(4):
        backoff.begin_text()
        backoff.unused(1.0, 1.0)
    assert backoff.resting
    backoff.begin_text()
    assert backoff.resting


def test_a_longer_rest_after_that_of_a_text_goes_on() -> None:
    backoff = Backoff(0.2, first_loss=2.0)
    for number in range(10):
        backoff.begin_text()
        for gain in ([2.0] * 4, [-0.4] * 2)[number % 2]:
            backoff.observe(1.0, 1 + round(gain), 1.0) if gain > 0 else backoff.unused(0.4, 1.0)
    backoff.begin_text()
    for _ in range(9):
        backoff.unused(0.4, 1.0)
    assert backoff.resting
    backoff.rest(1.0)
    backoff.begin_text()
    assert backoff.resting
