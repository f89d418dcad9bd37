"""Opens llguidance, an optional library that says what an answer of a given form may have, and a
model's tokenizer for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from edge_spec.core.text_codec import PiecewiseCodec, TextCodec
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


def open_llguidance() -> ModuleType:
    """Raises MissingDependencyError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise MissingDependencyError(
            "answers of a given form need llguidance, which is not installed",
            remedy='Run: pip install "edge-spec[grammar]".',
        ) from None
    return llguidance


def open_grammar_tokenizer(codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> Any:
    """Returns an LLTokenizer. Raises UsageError for a tokenizer that does not tell what its tokens
    spell.

    A form may have the text of a special token, such as a word to choose from: the answer spells
    it in other tokens, as messages do.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = list(stop_ids)
    if isinstance(codec, Tokenizer):
        try:
            library = LLTokenizer(codec.json_of_text(), n_vocab=vocab_size, eos_token=ends)
        except ValueError:
            library = LLTokenizer(codec.to_json(), n_vocab=vocab_size, eos_token=ends)
        added = codec.added_text()
        if not added:
            return library
        text = _AddedText(library, added)
        pieces = [text.piece(token) for token in range(vocab_size)]
        source = TokenizerWrapper(_Pieces(pieces, text.encode, stop_ids))
    elif isinstance(codec, PiecewiseCodec):
        pieces = [codec.piece(token) for token in range(vocab_size)]
        source = TokenizerWrapper(_Pieces(pieces, _of_text(codec), stop_ids))
    else:
        raise UsageError(
            "this model's tokenizer does not tell what its tokens spell, which answers of a "
            "given form need",
            remedy="Ask without a schema or grammar, or use another runtime.",
        )
    return LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)


def _of_text(codec: TextCodec) -> Encode:
    """Returns what encodes a part of an answer, without the beginning of a text."""
    special = {token for token, is_special in codec.added_tokens().values() if is_special}
    begin = codec.encode("")

    def encode(text: str) -> list[int]:
        return codec.encode_given(text, range(len(text)), special)[len(begin) :]

    return encode


class _AddedText:
    """A tokenizer whose added tokens are text where the model's own are: llguidance takes all of
    them for special ones, and then refuses the tag of a call that it demands of the model."""

    def __init__(self, library: Any, added: Mapping[int, str]) -> None:
        self._library = library
        self._added = {token: text.encode() for token, text in added.items()}

    def piece(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        is_special = self._library.is_special_token(token)
        return b"" if is_special else bytes(self._library.decode_bytes([token]))

    def encode(self, text: str) -> list[int]:
        return list(self._library.tokenize_str(text))


class _Pieces:
    """A tokenizer as llguidance's TokenizerWrapper reads it."""

    def __init__(self, pieces: Sequence[bytes], encode: Encode, stop_ids: Sequence[int]) -> None:
        self._encode = encode
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        # Without a text of its own, each of them would be taken for any other one.
        self.tokens = [piece or f"<|{token}|>".encode() for token, piece in enumerate(pieces)]
        self.eos_token_id = stop_ids[0]
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())
