"""Tokens to text and back: streams, stop strings, damaged tokenizers."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from edge_spec.errors import ModelFileError
from edge_spec.text.parts.part import StopCutter
from edge_spec.text.tokenizer import Tokenizer

BOS = 259


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(text=st.text(max_size=30))
def test_stream_pieces_join_to_the_text(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert byte_tokenizer.decode(ids) == text
    pieces = streamed(byte_tokenizer, ids)
    assert "".join(pieces) == text
    if not text.endswith("\ufffd"):
        assert pieces[-1] == ""


def test_a_character_appears_with_its_last_token(byte_tokenizer: Tokenizer) -> None:
    assert streamed(byte_tokenizer, list("a\u20acb".encode())) == ["a", "", "", "\u20ac", "b", ""]
    assert streamed(byte_tokenizer, list(b"a\xe2\x82")) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_recognised_and_have_no_text(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("a<eos>b") == [97, 258, 98]
    assert byte_tokenizer.decode([97, 258, 98]) == "ab"
    assert streamed(byte_tokenizer, [258, 97, 258, 98]) == ["", "a", "", "b", ""]
    assert byte_tokenizer.token_text(258) == "<eos>"
    assert byte_tokenizer.token_text(100_000) == ""


def test_words_are_joined_as_the_decoder_joins_them() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(words.to_str())
    assert streamed(tokenizer, tokenizer.encode("a b zz a")) == ["a", " b", " ?", " a", ""]


@pytest.mark.parametrize("text", ["ab", "<bos>ab", ""])
def test_bos_begins_every_text_once(byte_tokenizer_json: str, text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer_json, bos_id=BOS)
    assert tokenizer.encode(text) == [BOS, *text.removeprefix("<bos>").encode()]


@pytest.mark.parametrize("bos", [[], [BOS]])
def test_a_long_text_is_encoded_like_a_short_one(byte_tokenizer_json: str, bos: list[int]) -> None:
    tokenizer = Tokenizer(byte_tokenizer_json, *bos)
    line = "the other <eos> \u00fc\n"
    short = tokenizer.encode(line)[len(bos) :]
    assert tokenizer.encode(line * 2000) == bos + short * 2000


def test_truncation_and_padding_of_the_file_are_ignored(byte_tokenizer_json: str) -> None:
    inner = tokenizers.Tokenizer.from_str(byte_tokenizer_json)
    inner.enable_truncation(2)
    inner.enable_padding(length=10)
    assert Tokenizer(inner.to_str()).encode("abc") == [*b"abc"]


@pytest.mark.parametrize("json", ["", "{", "{}", '{"model": {"type": "nonesuch"}}'])
def test_a_damaged_tokenizer_is_a_model_file_error_of_one_line(json: str) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json") as caught:
        Tokenizer(json)
    assert "\n" not in str(caught.value)


# --- stop strings -----------------------------------------------------------------------------


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    cutter = StopCutter(stops)
    text = "".join(cutter.push(piece) for piece in pieces)
    return text + cutter.finish(), cutter.stopped


@given(
    stop=st.text("ab", min_size=1, max_size=5),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
@example(stop="aab", pieces=["aa", "b"])  # all of its beginning is held back
def test_the_text_ends_before_the_stop_string(stop: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert cut([stop], pieces) == (text.split(stop)[0], stop in text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
@example(stops=["aba", "b"], pieces=["ab", "a"])  # the shorter one is complete first
@example(stops=["b", "a"], pieces=["xa", "b"])
def test_the_cut_does_not_depend_on_how_the_text_is_divided(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    assert cut(stops, pieces) == cut(stops, [text]) == cut(stops, list(text))
    assert cut(stops, [*pieces, "c", "c"])[0].rstrip("c") == cut(stops, pieces)[0].rstrip("c")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_only_what_may_begin_a_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    cutter, pushed, shown = StopCutter(stops), "", ""
    for piece in pieces:
        pushed += piece
        shown += cutter.push(piece)
        if not cutter.stopped:
            held = pushed.removeprefix(shown)
            assert shown + held == pushed
            assert not held or any(stop.startswith(held) for stop in stops)


# --- stop strings that name special tokens ------------------------------------------------------

# What comes: text, and special tokens in angle brackets, which are no part of the text.
TRAIN = st.lists(st.sampled_from(["a", "b", "ab", "ba", "<x>", "<y>"]), max_size=12)


def cut_train(stops: list[str], train: list[str]) -> tuple[str, bool]:
    """train: text, and special tokens in angle brackets, which are no part of the text."""
    cutter = StopCutter(stops)
    shown = "".join(
        cutter.push("", each) if len(each) == 3 else cutter.push(each) for each in train
    )
    return shown + cutter.finish(), cutter.stopped


@pytest.mark.parametrize(
    ("stops", "train", "expected"),
    [
        (["<x>"], ["a", "<x>", "b"], ("a", True)),
        (["<x>"], ["a", "<y>", "b"], ("ab", False)),
        (["<x>"], ["a", "<", "x", ">", "b"], ("a", True)),  # written out as text
        (["<x>"], ["<x>"], ("", True)),
        (["b<x>"], ["a", "b", "<x>", "a"], ("a", True)),
        (["b<x>c"], ["a", "b", "<x>", "a"], ("a", True)),  # whatever follows
        (["b<x>"], ["a", "b", "a", "<x>"], ("aba", False)),
        (["<x>", "b"], ["a", "b", "<x>"], ("a", True)),
        (["ab"], ["a", "<x>", "b"], ("", True)),  # unnamed ones are not there
        (["x", "<y>b"], ["a", "<x>", "a"], ("aa", False)),  # a part of the name is no text
    ],
)
def test_a_stop_string_may_name_special_tokens(
    stops: list[str], train: list[str], expected: tuple[str, bool]
) -> None:
    assert cut_train(stops, train) == expected


@given(TRAIN, st.lists(st.sampled_from(["a<x>", "<x>", "<y>"]), max_size=3))
@example(["a", "<x>"], ["<x>", "a<x>"])  # the one that begins first
def test_the_text_ends_before_the_named_token_and_holds_no_name(
    train: list[str], stops: list[str]
) -> None:
    text = ""
    for each in train:
        if each[0] != "<":
            text += each
            continue
        before = [stop.removesuffix(each) for stop in stops if stop.endswith(each)]
        if ended := [part for part in before if text.endswith(part)]:
            assert cut_train(stops, train) == (text.removesuffix(max(ended, key=len)), True)
            return
    assert cut_train(stops, train) == (text, False)
