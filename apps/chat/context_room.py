"""Chooses what a conversation leaves out when its context is full.

Nothing is moved within a KV cache: tokens at other positions would have other scores than plain
decoding gives them. The shorter conversation is a prompt of its own, which is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_spec.text.chat_template import Message

CountTokens = Callable[[Sequence[Message]], int]


def num_to_leave_out(
    messages: Sequence[Message], count_tokens: CountTokens, context_length: int, answer_tokens: int
) -> int:
    """Returns how many of the oldest messages go, system messages at the beginning apart, which
    stay. 0 if there is room for an answer of `answer_tokens`, or of a quarter of the context if
    that is less; 0 also if the last turn alone is too long, so that nothing would be gained.

    Whole turns go: a message of the user with all that follows it up to the next one. So many go
    that half of the context is free, since the rest is read again each time; the last turn stays.
    count_tokens: of the prompt that messages make.
    """
    answer_tokens = min(answer_tokens, context_length // 4)
    if count_tokens(messages) + answer_tokens <= context_length:
        return 0
    opening = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    turns = [i for i in range(opening, len(messages)) if messages[i]["role"] == "user"]
    first: int | None = None
    most_tokens = context_length  # of the last turn
    for begin in reversed(turns):
        if count_tokens([*messages[:opening], *messages[begin:]]) > most_tokens:
            break
        first, most_tokens = begin, context_length // 2
    return 0 if first is None else first - opening
