"""The bytes and names of single tokens, for every kind of tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from edge_spec.text.token_pieces import TokenPiece, TokenPieces, shown
from edge_spec.text.tokenizer import Tokenizer
from fixtures import trained_tokenizers as trained

TEXT = "Hello worlds, \u201cok\u201d \U0001f999!"


def unigram() -> tokenizers.Tokenizer:
    """As T5's and XLM-R's, with tokens for bytes."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(trained.CORPUS, trainer)
    vocabulary = [
        (token, -10.0) for token in sorted(tokenizer.get_vocab()) if token not in ("<unk>", "</s>")
    ]
    listed = [("<unk>", 0.0), ("</s>", 0.0), *((byte, -20.0) for byte in in_bytes), *vocabulary]
    made = tokenizers.Tokenizer(models.Unigram(listed, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's."""
    tokens = ["[UNK]", "[CLS]", "hello", "world", "##s", ",", "!", "a", "##a"]
    made = tokenizers.Tokenizer(
        models.WordPiece({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[UNK]", "[CLS]"])
    return made


MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": lambda: trained.byte_level([]),
    "sentencepiece, every space": lambda: trained.sentencepiece("every"),
    "sentencepiece, first space": lambda: trained.sentencepiece("first"),
    "sentencepiece, no space": lambda: trained.sentencepiece("none"),
    "characters": trained.characters,
    "unigram": unigram,
}


@pytest.mark.parametrize("kind", MADE)
def test_each_token_has_the_bytes_that_its_vocabulary_spells(kind: str) -> None:
    made = MADE[kind]()
    codec = Tokenizer(made.to_str())
    expected = trained.token_bytes(made)
    assert [codec.piece(token) for token in range(len(expected))] == expected


@pytest.mark.parametrize("kind", MADE)
def test_the_bytes_of_a_texts_tokens_join_to_it(kind: str) -> None:
    """At its beginning a tokenizer may add a space, which belongs to no text."""
    codec = Tokenizer(MADE[kind]().to_str())
    ids = codec.encode(TEXT)
    assert b"".join(map(codec.piece, ids)).decode().removeprefix(" ") == TEXT
    names = [TokenPieces(codec).of(token).name for token in ids]
    assert any("\\x" in name for name in names)  # the llama is no token


def test_words_begin_with_a_space_and_their_parts_do_not() -> None:
    codec = Tokenizer(word_piece().to_str())
    pieces = TokenPieces(codec)
    listed = {codec.token_text(token): pieces.of(token) for token in range(9)}
    assert listed["world"] == TokenPiece(" world", b" world")
    assert listed["##s"] == TokenPiece("s", b"s")
    assert listed["[CLS]"] == TokenPiece("[CLS]", None)


def test_what_has_no_text_is_listed_by_its_name(byte_tokenizer: Tokenizer) -> None:
    pieces = TokenPieces(byte_tokenizer)
    assert pieces.of(258) == TokenPiece("<eos>", None)
    assert pieces.of(100_000) == TokenPiece("token_id:100000", None)  # a row without a token


def test_bytes_that_are_no_text_are_written_as_openai_does() -> None:
    assert shown(b" \xf0\x9f") == " \\xf0\\x9f"
    assert shown("\ufffd".encode()) == "\ufffd"


class Words:
    """A tokenizer of another package, that tells texts alone."""

    def decode(self, ids: list[int]) -> str:
        return "".join(["", " one"][token] for token in ids)

    def token_text(self, token: int) -> str:
        return ["<end>", "one"][token]


def test_a_tokenizer_that_tells_no_bytes_is_asked_for_text() -> None:
    pieces = TokenPieces(Words())  # type: ignore[arg-type]
    assert [pieces.of(0), pieces.of(1)] == [TokenPiece("<end>", None), TokenPiece(" one", b" one")]
