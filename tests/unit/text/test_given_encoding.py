"""Any tokenizer reads the control tokens that it is to read, and the others as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from edge_spec.text.given_encoding import _places, encode_given
from edge_spec.text.tokenizer import Tokenizer
from fixtures.trained_tokenizers import PUBLISHED, byte_level, characters, sentencepiece

PIECES = (
    *("<|end|>", "<|user|>", "</s>", "<s>", "<|", "|>", "end", "a"),
    *(" ", "  ", "\n", "\n\n", "é"),
)


def spaced(**flags: bool) -> tokenizers.Tokenizer:
    """Tokens that take spaces with them, or are found in a text in which others stand for these."""
    tokenizer = sentencepiece("every")
    tokenizer.add_special_tokens([AddedToken("<|end|>", **flags), AddedToken("<|user|>", **flags)])
    return tokenizer


def upper_case() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE({each: at for at, each in enumerate(ALPHABET)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=True) for text in ("<|end|>", "<|user|>")]
    )
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Has its special tokens in its vocabulary, as the library's own trainer puts them there."""
    special = ["<unk>", "<|end|>", "<|user|>", "</s>"]
    scored = [(text, 0.0) for text in special] + [(each, -5.0) for each in ALPHABET]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(special)
    return tokenizer


def with_gaps() -> tokenizers.Tokenizer:
    """Has fewer tokens in its vocabulary than the largest of them says."""
    special = ["<|end|>", "<|user|>"]
    vocabulary = {each: 2 * at for at, each in enumerate([*ALPHABET, *special])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(special)
    return tokenizer


def in_merges() -> tokenizers.Tokenizer:
    """Joins the letters of a special token, too."""
    text = "<|end|>"
    parts = [text[:n] for n in range(2, len(text) + 1)]
    vocabulary = {each: at for at, each in enumerate([*ALPHABET, *parts])}
    merges = [(part[:-1], part[-1]) for part in parts]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([text, "<|user|>"])
    return tokenizer


ALPHABET = sorted({*"".join(PIECES), "\u2581"})
MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{name: lambda steps=steps: byte_level(steps) for name, steps in PUBLISHED.items()},
    **{prefix: lambda prefix=prefix: sentencepiece(prefix) for prefix in ("every", "first")},
    "characters": characters,
    "takes spaces": lambda: spaced(lstrip=True, rstrip=True),
    "normalized": lambda: spaced(normalized=True),
    "single word": lambda: spaced(single_word=True),
    "other case": upper_case,
    "unigram": unigram,
    "gaps": with_gaps,
    "in merges": in_merges,
}
TOKENIZERS = {name: make() for name, make in MADE.items()}


def control_of(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    added = tokenizer.get_added_tokens_decoder().items()
    return {token: one.content for token, one in added if one.content in PIECES}


def encoded(name: str, text: str, places: Any) -> list[int]:
    tokenizer = TOKENIZERS[name]
    control = control_of(tokenizer)
    return encode_given(tokenizer, text, places, control)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12))
def test_what_nobody_gave_is_encoded_as_ever(name: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    assert encoded(name, text, []) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12))
def test_a_text_that_is_given_has_no_control_token(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    found = encoded(name, text, range(len(text)))
    assert not control_of(TOKENIZERS[name]).keys() & {*found}


@pytest.mark.parametrize(
    "name", [name for name in TOKENIZERS if name not in ("unigram", "in merges")]
)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12))
def test_all_of_the_text_is_there(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    plain = tokenizers.Tokenizer.from_str(TOKENIZERS[name].to_str())
    plain.encode_special_tokens = True
    expected = plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(encoded(name, text, range(len(text)))) == plain.decode(expected)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), max_size=12))
def test_as_many_are_read_as_nobody_gave(name: str, parts: list[tuple[str, bool]]) -> None:
    """The part of the text that was given is told apart only by its places."""
    text = "".join(part for part, _ in parts)
    places, at = [], 0
    for part, is_given in parts:
        places += range(at, at + len(part)) if is_given else []
        at += len(part)
    tokenizer = TOKENIZERS[name]
    control = control_of(tokenizer)
    whole = tokenizer.encode(text, add_special_tokens=False)
    read = [
        each.token
        for each in _places(tokenizer, whole, text)
        if each.token in control and not {*range(each.start, each.end)} & {*places}
    ]
    assert [token for token in encoded(name, text, places) if token in control] == read


def test_a_private_character_in_the_text_is_no_token() -> None:
    text = "\ue000258\ue000<|end|>\ue000"
    tokenizer = TOKENIZERS["qwen2"]
    (end,) = (token for token, name in control_of(tokenizer).items() if name == "<|end|>")
    places = range(len(text) - 1, len(text))
    assert encoded("qwen2", text + "<|end|>", range(len(text))).count(end) == 1
    assert encoded("qwen2", text, places) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_tokenizer_reads_them_with_its_own_beginning() -> None:
    tokenizer = TOKENIZERS["every"]
    bos = tokenizer.token_to_id("<s>")
    codec = Tokenizer(tokenizer.to_str(), bos)
    control = control_of(tokenizer)
    assert codec.encode_given("<s>a", [], control) == codec.encode("a")
    text = codec.encode_given("<s>a", range(4), control)
    assert text[0] == bos and bos not in text[1:]
