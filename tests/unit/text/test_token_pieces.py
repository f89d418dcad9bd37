"""The bytes and names of single tokens, for every kind of tokenizer.json."""

from __future__ import annotations

import pytest

from edge_spec.text.token_pieces import ByteStream, TokenPiece, TokenPieces, shown
from edge_spec.text.tokenizer import Tokenizer
from fixtures import trained_tokenizers as trained

KINDS = [kind for kind in trained.MADE if kind != "words"]
TEXT = "Hello worlds, \u201cok\u201d \U0001f999!"


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_the_bytes_that_its_vocabulary_spells(kind: str) -> None:
    made = trained.MADE[kind]()
    codec = Tokenizer(made.to_str())
    expected = trained.token_bytes(made)
    assert [codec.piece(token) for token in range(len(expected))] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_texts_tokens_join_to_it(kind: str) -> None:
    """At its beginning a tokenizer may add a space, which belongs to no text."""
    codec = Tokenizer(trained.MADE[kind]().to_str())
    ids = codec.encode(TEXT)
    assert b"".join(map(codec.piece, ids)).decode().removeprefix(" ") == TEXT
    names = [TokenPieces(codec).of(token).name for token in ids]
    assert any("\\x" in name for name in names)  # the llama is no token


def test_words_begin_with_a_space_and_their_parts_do_not() -> None:
    codec = Tokenizer(trained.word_piece().to_str())
    pieces = TokenPieces(codec)
    listed = {codec.token_text(token): pieces.of(token) for token in range(9)}
    assert listed["world"] == TokenPiece(" world", b" world")
    assert listed["##s"] == TokenPiece("s", b"s")
    assert listed["[CLS]"] == TokenPiece("[CLS]", None)


def test_what_has_no_text_is_listed_by_its_name(byte_tokenizer: Tokenizer) -> None:
    pieces = TokenPieces(byte_tokenizer)
    assert pieces.of(258) == TokenPiece("<eos>", None)
    assert pieces.of(100_000) == TokenPiece("token_id:100000", None)  # a row without a token


def test_a_vocabulary_is_read_once(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled = byte_tokenizer.vocabulary()
    read: list[Tokenizer] = []

    def vocabulary(self: Tokenizer) -> dict[str, int]:
        read.append(self)
        return spelled

    monkeypatch.setattr(Tokenizer, "vocabulary", vocabulary)
    pieces = TokenPieces(byte_tokenizer)
    expected = {token for text, token in spelled.items() if ">" in text}
    assert len(expected) > 1  # with special tokens
    assert set(pieces.spelled_with(">")) == set(pieces.spelled_with(">")) == expected
    assert read == [byte_tokenizer]


def test_bytes_that_are_no_text_are_written_as_openai_does() -> None:
    assert shown(b" \xf0\x9f") == " \\xf0\\x9f"
    assert shown("\ufffd".encode()) == "\ufffd"


def test_a_text_waits_for_the_rest_of_its_last_character() -> None:
    piece = {0: b" \xe2", 1: b"\x82\xac", 2: b"a"}.__getitem__
    stream = ByteStream(piece, piece)
    assert [*map(stream.push, (0, 1, 2, 0)), stream.finish()] == ["", " \u20ac", "a", "", " \ufffd"]
