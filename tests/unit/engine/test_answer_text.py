"""Tokens and text of an answer in step, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.core.sampling import Score
from edge_spec.engine.answer_text import AnswerText
from edge_spec.engine.results import Chunk, DecodedToken, GenerationResult, Origin, Token
from edge_spec.testing import ScriptedModel
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.tokenizer import Tokenizer
from fixtures import trained_tokenizers as trained

KINDS = ("bytes", "every space", "first space", "no space", "characters", "unigram", "words")
TEXTS = ("Hello world, \u201cok\u201d", " \U0001f999\U0001f999 two  spaces", "a\ufffdb", "\u00e9")


@cache
def codec(kind: str) -> Tokenizer:
    return Tokenizer(trained.MADE[kind]().to_str())


def written(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stops: Sequence[str] = (),
    prompt: Sequence[int] = (),
    sizes: Sequence[int] = (1,),
) -> tuple[GenerationResult, list[Chunk]]:
    """sizes: of rounds, in turn."""
    result = GenerationResult()
    text = AnswerText(result, tokenizer, prompt, stops, frozenset())
    chunks, start, turn = [], 0, 0
    while start < len(ids) and not text.stopped:
        size = sizes[turn % len(sizes)]
        tokens = [
            DecodedToken(token, Origin.PLAIN, score=Score(-1.0, ((token, -1.0),)))
            for token in ids[start : start + size]
        ]
        chunks += text.push(tokens)
        start, turn = start + size, turn + 1
    chunks += text.finish()
    return result, chunks


def shown(tokens: Sequence[Token]) -> list[tuple[int, str, str, bytes | None]]:
    return [(token.id, token.text, token.name, token.raw) for token in tokens]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(data=st.data())
def test_what_is_handed_out_does_not_depend_on_rounds(kind: str, data: Any) -> None:
    tokenizer = codec(kind)
    size = len(tokenizer.vocabulary())
    known = st.sampled_from([token for text in TEXTS for token in tokenizer.encode(text)])
    ids = data.draw(st.lists(st.one_of(known, st.integers(0, size - 1)), max_size=14))
    prompt = data.draw(st.sampled_from([[], tokenizer.encode("a")]))
    whole = written(tokenizer, ids, (), prompt)[0].text
    places = st.tuples(st.integers(0, 12), st.integers(1, 3))
    stops = [whole[at : at + length] for at, length in data.draw(st.lists(places, max_size=2))]
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    expected, _ = written(tokenizer, ids, stops, prompt)
    result, chunks = written(tokenizer, ids, stops, prompt, sizes)
    assert shown(result.tokens) == shown(expected.tokens) and result.text == expected.text
    streamed = [token for chunk in chunks for token in chunk.tokens]
    assert [entry[2:] for entry in shown(streamed)] == [entry[2:] for entry in shown(result.tokens)]
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert "".join(token.text for token in result.tokens) == result.text
    if any(stops):
        assert all(chunk.text == "".join(token.text for token in chunk.tokens) for chunk in chunks)
    raw = b"".join(token.raw or b"" for token in result.tokens)
    assert kind == "words" or raw.decode("utf-8", "replace") == result.text


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize(("after", "shown"), [("", "\ufffd"), ("!", "\ufffd!")])
def test_a_character_that_lacks_bytes_changes_none_before_it(
    kind: str, after: str, shown: str
) -> None:
    tokenizer = codec(kind)
    llama = [*"\U0001f999".encode()]
    in_bytes = {
        tokenizer.piece(token): token for token in reversed(tokenizer.vocabulary().values())
    }
    ids = [in_bytes[bytes([byte])] for byte in (*llama, *llama, *llama[:2], *after.encode())]
    result, _ = written(tokenizer, ids)
    assert result.text == tokenizer.decode(ids) == f"\U0001f999\U0001f999{shown}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_begins_with_its_space(kind: str) -> None:
    """Whichever tokens a text is cut between, the rest goes on with it."""
    tokenizer = codec(kind)
    text = "hello worlds, hello" if kind == "words" else "Hello worlds, hello"
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        result, _ = written(tokenizer, ids[cut:], prompt=ids[:cut])
        assert before + result.text == whole
        begun, _ = written(tokenizer, ids[cut:])  # after a special token, or none
        assert begun.text in (result.text, result.text.removeprefix(" "), f"##{result.text}")
        assert begun.tokens[0].name == begun.tokens[0].text


def test_a_message_begins_without_the_space_that_a_continuation_has(make_engine: Any) -> None:
    """The template ends in text, as that of Llama 2 does."""
    tokenizer = codec("every space")
    script = tokenizer.encode("Hello world")
    size = len(tokenizer.vocabulary())

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        written = next((n for n in range(len(script), 0, -1) if list(tokens[-n:]) == script[:n]), 0)
        return np.eye(size, dtype=np.float32)[script[written % len(script)]]

    engine = make_engine(ScriptedModel(logits, size))
    text = ChatFormat(tokenizer, "{{ messages[0].content }}:", eos_ids=(2,), bos_id=None)
    engine.parts = replace(engine.parts, text=text)
    limit = {"max_tokens": len(script), "logprobs": 0}
    assert engine.chat("b", **limit).text == "Hello world"
    assert engine.generate("b:", **limit).text == " Hello world"
    messages = [{"role": "user", "content": "b"}]
    prompt = engine.chat_prompt(messages)
    for asked, space in ((prompt, ""), (list(prompt), " ")):
        result = engine.generate(asked, **limit)
        assert result.text == b"".join(token.raw for token in result.tokens).decode()
        assert result.text == f"{space}Hello world"


@pytest.mark.parametrize(
    ("stops", "text", "found"),
    [
        ((), "one two three", None),
        (("four",), "one two three", None),
        (("three", "two"), "one ", "two"),
        (("two three", " two"), "one", " two"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_stop_string_that_ended_a_text_is_known(
    stops: Sequence[str], text: str, found: str | None, size: int
) -> None:
    tokenizer = codec("bytes")
    result, _ = written(tokenizer, tokenizer.encode("one two three"), stops, sizes=(size,))
    assert (result.text, result.stop) == (text, found)
