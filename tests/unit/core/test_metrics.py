"""Statistics against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from edge_spec.core.metrics import DraftCounts, PlainRate, PlainReason, RoundStats, Stats


def round_stats(
    drafted: int = 0,
    accepted: int = 0,
    reason: PlainReason | None = None,
    seconds: tuple[float, float, float] = (0.001, 0.004, 0.008),
) -> RoundStats:
    draft_s, forward_s, total_s = seconds
    return RoundStats(
        drafted + 1, drafted, accepted, accepted + 1, reason, 1, draft_s, forward_s, total_s
    )


def test_sums_and_rates_of_a_generation() -> None:
    stats = Stats()
    for drafted, accepted in [(4, 4), (4, 1), (2, 0), (4, 1)]:
        stats.observe(round_stats(drafted, accepted))
    stats.observe(round_stats(reason=PlainReason.NO_CANDIDATE))
    stats.observe(round_stats(reason=PlainReason.BUDGET))
    assert (stats.rounds, stats.plain_rounds) == (6, 2)
    assert stats.predicted_n == 5 + 2 + 1 + 2 + 1 + 1
    assert (stats.draft_n, stats.draft_n_accepted) == (14, 6)
    assert stats.acceptance_rate == 6 / 14
    assert stats.mean_accepted_length == 12 / 6
    assert stats.acceptance_histogram == {4: 1, 1: 2, 0: 1}  # speculative rounds only
    assert stats.plain_reasons == {"no_candidate": 1, "budget": 1}
    assert stats.near_ties == 6
    assert stats.predicted_ms == pytest.approx(48)
    assert stats.draft_ms == pytest.approx(6)
    assert stats.verify_ms == pytest.approx(24)
    assert stats.overhead_ms == pytest.approx(18)
    assert stats.predicted_per_second == pytest.approx(250)


@pytest.mark.parametrize(
    ("count", "accepted", "by_drafter"),
    [
        (4, 3, {"a": DraftCounts(3, 3), "b": DraftCounts(2, 1)}),  # whole
        (3, 3, {"a": DraftCounts(3, 3), "b": DraftCounts(2, 1)}),  # without the target's own
        (1, 1, {"a": DraftCounts(3, 1), "b": DraftCounts(2, 0)}),
        (0, 0, {"a": DraftCounts(3, 0), "b": DraftCounts(2, 0)}),
    ],
)
def test_what_a_stop_string_cuts_off_was_verified_and_is_not_accepted(
    count: int, accepted: int, by_drafter: dict[str, DraftCounts]
) -> None:
    whole = round_stats(4, 3)._replace(
        by_drafter={"a": DraftCounts(3, 3), "b": DraftCounts(2, 1)},
        tokens=(7, 8, 9, 10),
        accepted_by=("a", "a+b", "a"),
    )
    cut = whole.first_tokens(count)
    assert (cut.num_tokens, cut.num_accepted, cut.num_draft_tokens) == (count, accepted, 4)
    assert cut.by_drafter == by_drafter and cut.tokens == whole.tokens[:count]
    assert cut.total_s == whole.total_s


def test_plain_decoding_has_a_round_for_each_token_of_a_stop_string() -> None:
    stats = Stats(plain_per_second=125.0, stop_n=2)
    for _ in range(3):
        stats.observe(round_stats(reason=PlainReason.OFF))
    for _ in range(2):
        stats.observe(round_stats(reason=PlainReason.OFF).first_tokens(0))
    assert (stats.predicted_n, stats.rounds) == (3, 5)
    assert stats.mean_accepted_length == 1
    assert stats.speedup == pytest.approx(1)


def test_speedup_is_the_rate_over_the_measured_plain_rate() -> None:
    stats = Stats()
    stats.observe(round_stats(3, 3, seconds=(0, 0.02, 0.02)))  # 200 tokens/s
    assert stats.speedup is None
    stats.plain_per_second = 80.0
    assert stats.speedup == pytest.approx(2.5)


def test_without_rounds_nothing_is_claimed() -> None:
    stats = Stats(plain_per_second=80.0)
    assert stats.speedup is None
    assert stats.acceptance_rate is None
    assert stats.mean_accepted_length is None
    assert stats.predicted_per_second == 0


def test_without_draft_tokens_there_is_no_acceptance_rate() -> None:
    stats = Stats()
    stats.observe(round_stats(reason=PlainReason.OFF))
    assert stats.acceptance_rate is None
    assert stats.acceptance_histogram == {}


def test_the_plain_rate_is_the_median_of_plain_rounds_and_needs_three() -> None:
    rate = PlainRate()
    for total_s in (0.010, 0.500):
        rate.observe(round_stats(reason=PlainReason.OFF, seconds=(0, 0, total_s)))
        rate.observe(round_stats(4, 4, seconds=(0, 0, 0.001)))  # speculative: not counted
        assert rate.tokens_per_second is None
    rate.observe(round_stats(reason=PlainReason.BUDGET, seconds=(0, 0, 0.020)))
    assert rate.tokens_per_second == pytest.approx(50)


def test_rounds_that_fill_a_plain_step_count_as_plain_without_their_drafting() -> None:
    rate = PlainRate(plain_width=2)
    for _ in range(3):
        rate.observe(round_stats(1, 1, seconds=(0.004, 0, 0.014))._replace(num_rows=2))
        rate.observe(round_stats(2, 1, seconds=(0, 0, 0.5))._replace(num_rows=3))
    assert rate.tokens_per_second == pytest.approx(100)


def test_rates_are_told_against_the_fastest_plain_step_too() -> None:
    stats = Stats(plain_per_second=50.0, plain_width=2, plain_cost=1.25)
    stats.observe(round_stats(4, 2, seconds=(0, 0, 0.03)))  # three tokens
    assert stats.fastest_plain_per_second == pytest.approx(62.5)
    assert stats.speedup_over_fastest_plain == pytest.approx(100 / 62.5)


def test_the_plain_rate_follows_recent_rounds() -> None:
    rate = PlainRate()
    for total_s in [0.010] * 300 + [0.020] * 300:
        rate.observe(round_stats(reason=PlainReason.OFF, seconds=(0, 0, total_s)))
    assert rate.tokens_per_second == pytest.approx(50)


def test_draft_tokens_that_were_ready_count_where_they_were_verified() -> None:
    stats = Stats()
    stats.observe(round_stats(4, 2)._replace(anticipated=True))
    stats.observe(round_stats(4, 2))
    stats.observe(round_stats(reason=PlainReason.BELOW_BREAK_EVEN)._replace(anticipated=True))
    assert stats.anticipated_n == stats.to_dict()["anticipated_n"] == 1


def test_statistics_are_json_under_the_fields_names() -> None:
    stats = Stats(prompt_n=7, cached_n=3)
    stats.observe(round_stats(4, 2))
    stats.observe(round_stats(reason=PlainReason.COOLDOWN))
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["acceptance_histogram"] == {"2": 1}
    assert values["plain_reasons"] == {"cooldown": 1}
    assert set(values) == {
        *("prompt_n", "cached_n", "prompt_ms", "ttft_ms"),
        *("predicted_n", "predicted_ms", "predicted_per_second"),
        *("draft_n", "draft_n_accepted", "acceptance_rate", "acceptance_histogram", "drafters"),
        *("lossless", "plain_width", "fastest_plain_per_second", "speedup_over_fastest_plain"),
        *("mean_accepted_length", "rounds", "plain_rounds", "plain_reasons"),
        *(
            "draft_ms",
            "verify_ms",
            "overhead_ms",
            "near_ties",
            "anticipated_n",
            "overlapped_n",
            "overlap_reasons",
            "failed_drafters",
            "plain_per_second",
            "speedup",
            "policy",
            "kernels",
        ),
    }
