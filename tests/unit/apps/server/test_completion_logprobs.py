"""Names of tokens in the log probabilities of text completions."""

from __future__ import annotations

from edge_spec import Token
from edge_spec.apps.server.reply import completion_logprobs
from edge_spec.engine.results import Alternative, Origin


def token(id: int, text: str, raw: bytes, *tops: Alternative) -> Token:
    return Token(id, text, Origin.PLAIN, "", -0.5, tops, text, raw)


def test_of_tokens_with_one_text_the_likeliest_is_listed() -> None:
    tops = Alternative(1, "a", -0.5, b"a"), Alternative(2, "a", -2.0, b"a")
    told = completion_logprobs([token(1, "a", b"a", *tops), token(3, "bc", b"bc")], 4)
    assert told["tokens"] == ["a", "bc"] and told["text_offset"] == [4, 5]
    assert told["top_logprobs"] == [{"a": -0.5}, {}]


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    told = completion_logprobs([token(1, "", b"\xf0\x9f")], 0)
    assert told["tokens"] == [r"bytes:\xf0\x9f"] and told["top_logprobs"] is None
    nothing = completion_logprobs([], 3)
    assert nothing["tokens"] == nothing["text_offset"] == []
