"""A drafter that waited once for another process is asked again."""

from __future__ import annotations

from edge_spec.control.drafter_record import DrafterRecord

PLAIN_S = 0.016


def test_a_first_answer_that_waited_is_not_expected_of_the_next_one() -> None:
    record = DrafterRecord(0.1 * PLAIN_S)
    own_s, read_s = record.answered(0, 20 * PLAIN_S, PLAIN_S)
    assert (own_s, read_s) == (20 * PLAIN_S, 0)  # it pays for what it has taken
    assert record.answer_s(0) <= PLAIN_S


def test_a_first_answer_may_take_what_its_draft_tokens_do() -> None:
    record = DrafterRecord(0.5 * PLAIN_S)
    own_s, _ = record.answered(6, 3.3 * PLAIN_S, PLAIN_S)
    assert own_s == 3.3 * PLAIN_S


def test_a_round_that_waited_is_not_what_observing_one_takes() -> None:
    record = DrafterRecord(0.1 * PLAIN_S)
    record.watched(4 * PLAIN_S, PLAIN_S)
    assert record.answer_s(0) < PLAIN_S / 2
    for _ in range(100):
        record.watched(0.3 * PLAIN_S, PLAIN_S)
    assert abs(record.answer_s(0) / PLAIN_S - 0.3) < 0.05
