"""Slices of prompts beside the rounds of others: how long they are, and whose turn it is."""

from __future__ import annotations

from edge_spec.control.pass_times import SharingTimes
from edge_spec.core.model import Session
from edge_spec.core.tree import TokenTree
from edge_spec.engine.pass_requests import PromptRequest, TreeRequest
from edge_spec.engine.prompt_slices import LEAST_SLICE, PromptSlices
from edge_spec.testing import ScriptedModel, random_logits

FIXED_S, ROW_S = 8e-3, 1e-3  # of passes without slices
USUAL_ROWS = 4.0


def session() -> Session:
    return ScriptedModel(random_logits(10), 10).open_session()


def prompt(num_tokens: int, arrived_s: float = 0.0) -> PromptRequest:
    made = PromptRequest(session(), [1] * num_tokens)
    made.arrived_s = arrived_s
    return made


def slices() -> tuple[PromptSlices, SharingTimes]:
    times = SharingTimes()
    for rows in range(1, 9):
        for _ in range(20):
            times.observe_alone(rows, FIXED_S + rows * ROW_S)
    return PromptSlices(times), times


def test_a_slice_makes_a_pass_twice_as_long_at_most_however_dear_its_tokens() -> None:
    """Tokens of a long prompt take longer than rows, which is not to lengthen what is usual."""
    made, times = slices()
    usual_s = FIXED_S + 4 * ROW_S
    long = prompt(10_000)
    for token_s in (1e-3, 2e-3, 2.9e-3):
        for _ in range(40):
            made.take([long], 4, USUAL_ROWS, room=60)
            seconds = usual_s + long.num_rows * token_s
            made.observe([long], 4, long.num_rows, seconds)
        assert 1.5 * usual_s < seconds < 2.05 * usual_s
    assert abs(times.all.at(4) - usual_s) < 0.1 * usual_s


def test_a_short_prompt_is_read_at_once_and_the_end_of_a_long_one_is_not() -> None:
    """At 1 ms a token, passes of 12 ms have slices of 12 tokens, and room for 36 at most."""
    made, _ = slices()
    for num_tokens, num_read in ((30, 30), (34, 34), (38, 12)):
        short = prompt(num_tokens)
        short.token_s = 1e-3
        made.take([short], 4, USUAL_ROWS, room=60)
        assert abs(short.num_rows - num_read) <= 1
    short.session.prefill([1] * 12)
    made.take([short], 4, USUAL_ROWS, room=60)
    assert short.num_left == 26 and abs(short.num_rows - 12) <= 1


def test_the_least_slice_is_read_in_any_case_and_a_room_that_is_too_small_is_told() -> None:
    made, _ = slices()
    long, other = prompt(1000), prompt(1000)
    long.token_s = 1.0
    taken, is_short = made.take([long, other], 4, USUAL_ROWS, room=60)
    assert taken == [long] and long.num_rows == LEAST_SLICE and not is_short
    long.token_s = 1e-4
    taken, is_short = made.take([long, other], 4, USUAL_ROWS, room=20)
    assert taken == [long] and long.num_rows == 20 and is_short


def test_a_short_prompt_does_not_wait_for_a_long_one_which_goes_on_all_the_same() -> None:
    made, _ = slices()
    tree = TreeRequest(session(), TokenTree.chain(1), 0)
    long, short = prompt(1000, arrived_s=1.0), prompt(20, arrived_s=2.0)
    turns = [made.in_turn([tree, long, short]) for _ in range(6)]
    assert all(turn[0] is tree and set(turn) == {tree, long, short} for turn in turns)
    assert [turn[1] for turn in turns].count(long) == [turn[1] for turn in turns].count(short) == 3


def test_of_prompts_of_one_length_the_first_is_read_first() -> None:
    """One answer begins early and the last one no later than if all were read side by side."""
    made, _ = slices()
    first, second = prompt(500, arrived_s=1.0), prompt(500, arrived_s=2.0)
    assert all(made.in_turn([second, first]) == [first, second] for _ in range(4))


def test_now_and_then_others_have_a_pass_without_prompts() -> None:
    made, _ = slices()
    assert 1 <= sum(made.pauses() for _ in range(40)) <= 5
