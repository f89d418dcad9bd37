"""What is left out of a conversation that fills its context."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.apps.chat.conversation import num_to_leave_out
from edge_spec.text.plain_messages import Message

CONTEXT = 100


def turn(user: int, assistant: int) -> list[Message]:
    """Two messages of so many tokens."""
    return [
        {"role": "user", "content": "x" * user},
        {"role": "assistant", "content": "x" * assistant},
    ]


def left_out(messages: list[Message], answer_tokens: int = 20) -> int:
    def count(some: Any) -> int:
        return sum(len(message["content"]) for message in some)

    return num_to_leave_out(messages, count, CONTEXT, answer_tokens)


SYSTEM: Message = {"role": "system", "content": "x" * 10}
ASKED: Message = {"role": "user", "content": "x" * 10}


@pytest.mark.parametrize(("held", "expected"), [(70, 0), (71, 2)])
def test_turns_go_only_where_the_answer_would_not_fit(held: int, expected: int) -> None:
    assert left_out([*turn(35, held - 35), ASKED], answer_tokens=20) == expected


def test_so_many_turns_go_that_half_of_the_context_is_free() -> None:
    messages = [SYSTEM, *turn(10, 5), *turn(10, 5), *turn(10, 5), *turn(10, 5), *turn(10, 5), ASKED]
    assert left_out(messages) == 6  # system, two turns and the question are 50 tokens


def test_the_last_turn_stays_where_it_fills_more_than_half() -> None:
    long: Message = {"role": "user", "content": "x" * 85}
    assert left_out([SYSTEM, *turn(10, 10), long]) == 2


def test_calls_of_tools_go_with_the_turn_that_they_belong_to() -> None:
    tool: Message = {"role": "tool", "content": "x" * 40}
    messages = [*turn(10, 10), tool, {"role": "assistant", "content": "x" * 10}, *turn(5, 5), ASKED]
    assert left_out(messages) == 4
