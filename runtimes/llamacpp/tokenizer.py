"""llama.cpp's tokenizer, for vocabularies that the `tokenizers` library lacks."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from edge_spec.errors import ModelFileError
from edge_spec.runtimes.llamacpp.library import NAME, VOCABULARY_ONLY, Library
from edge_spec.text.given_encoding import Place, occurrences, pattern_of, touches
from edge_spec.text.token_pieces import ByteStream

_FIRST_PIECE_BYTES = 64
# llama_token_attr: unknown or control, user-defined, lstrip, rstrip.
_SPECIAL, _USER_DEFINED, _STRIPS_BEFORE, _STRIPS_AFTER = 1 | 8, 16, 128, 256


class LibraryTokenizer:
    """Recognises special tokens in a text and adds only BOS. Loads no weights."""

    def __init__(self, library: Library, path: Path, bos_id: int | None) -> None:
        known = library.log.num_errors
        model = library.load_model(os.fsencode(path), VOCABULARY_ONLY)
        if model is None:
            raise ModelFileError(
                f"{NAME} cannot read the vocabulary of {path}: {library.log.errors_after(known)}",
                remedy="Download or convert the file again.",
            )
        weakref.finalize(self, library.llama_model_free, model)
        self._library = library
        self._bos_id = bos_id
        self._vocabulary = library.llama_model_get_vocab(model)
        self._size = library.vocab_size(model)

    def encode(self, text: str) -> list[int]:
        """Encode text, with BOS first if the model wants it."""
        return self._begun(self._tokens(text))

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
        """Encode, but read `control` tokens that touch a given character as plain text.

        Text between two recognised tokens is encoded in one piece, to keep word splits.
        """
        read: list[Place] = []
        plain: list[int] = []  # starts of tokens to read as plain text
        for start, end in occurrences(self._pattern, text):
            token, _ = self._added[text[start:end]]
            if token in control and touches(given, start, end):
                plain.append(start)
            elif not read or start >= read[-1].end:
                read.append(Place(start, end, token))
        tokens: list[int] = []
        begin = 0  # of the text not yet encoded
        for before, after in pairwise([Place(0, 0, -1), *read, Place(len(text), len(text), -1)]):
            if touches(plain, before.end, after.start):
                tokens += self._tokens(text[begin : before.end])
                tokens += self._plain_tokens(text, before, after, plain)
                begin = after.start
        return self._begun(tokens + self._tokens(text[begin:]))

    def _plain_tokens(
        self, text: str, before: Place, after: Place, plain: Sequence[int]
    ) -> list[int]:
        """Encode text between tokens as plain text. The library always parses user-defined tokens,
        so they are cut after a character."""
        start, end = before.end, after.start
        between = text[start:end]
        if self._has(before.token, _STRIPS_AFTER):
            start = end - len(between.lstrip())
        if self._has(after.token, _STRIPS_BEFORE):
            end -= len(between) - len(between.rstrip())
        defined = [
            at + 1
            for at in plain
            if start <= at < end and (found := self._pattern.match(text, at))
            if not self._added[found.group()][1]
        ]
        return [
            token
            for first, last in pairwise([start, *defined, max(start, end)])
            for token in self._tokens(text[first:last], parse_special=False)
        ]

    def _begun(self, tokens: list[int]) -> list[int]:
        if self._bos_id is not None and tokens[:1] != [self._bos_id]:
            tokens.insert(0, self._bos_id)
        return tokens

    def _tokens(self, text: str, *, parse_special: bool = True) -> list[int]:
        raw = text.encode("utf-8", "replace")
        size = len(raw) + 8  # one token per byte and a leading space mostly suffice
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self._library.llama_tokenize(
                self._vocabulary, raw, len(raw), ids, size, False, parse_special
            )
            if count >= 0:
                return list(ids[:count])
            size = -count  # e.g. each space becomes three bytes

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Return each added token's text, id and whether it is special."""
        return self._added

    @property
    def reads_variants(self) -> bool:
        return False

    @cached_property
    def _added(self) -> dict[str, tuple[int, bool]]:
        found = (
            (self.token_text(token), (token, self._has(token, _SPECIAL)))
            for token in range(self._size)
            if self._has(token, _SPECIAL | _USER_DEFINED)
        )
        return {text: each for text, each in found if text}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self._added)

    def _has(self, token: int, attributes: int) -> bool:
        return token >= 0 and bool(
            self._library.llama_vocab_get_attr(self._vocabulary, token) & attributes
        )

    def decode(self, ids: Sequence[int]) -> str:
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(self) -> ByteStream:
        return ByteStream(self.piece, self._first_piece)

    def _first_piece(self, token: int) -> bytes:
        """Return the first token's bytes without the space that some vocabularies add."""
        piece = self.piece(token)
        return piece.removeprefix(b" ") if self._adds_space else piece

    @cached_property
    def _adds_space(self) -> bool:
        return any(self.piece(token).startswith(b" ") for token in self._tokens("a")[:1])

    def token_text(self, token: int) -> str:
        if not 0 <= token < self._size:
            return ""
        text = self._library.llama_vocab_get_text(self._vocabulary, token) or b""
        return text.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Return the token that this spelling encodes to, if it has that spelling."""
        found = self._tokens(text)
        is_whole = len(found) == 1 and self.token_text(found[0]) == text
        return found[0] if is_whole else None

    def special_text(self, token: int) -> str:
        """Return a special token's spelling, "" for others."""
        text = self.token_text(token)  # "" if unknown: `piece` needs a valid id
        return "" if not text or self.piece(token) else text

    def vocabulary(self) -> dict[str, int]:
        return {self.token_text(token): token for token in range(self._size)}

    def piece(self, token: int) -> bytes:
        """Return the token's bytes, perhaps part of a character."""
        size = _FIRST_PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.llama_token_to_piece(
                self._vocabulary, token, buffer, size, 0, False
            )
            if count >= 0:
                return buffer.raw[:count]
            size = -count
