"""The library's own tokenizer, for vocabularies that the `tokenizers` library cannot do."""

from __future__ import annotations

import codecs
import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from edge_spec.errors import ModelFileError
from edge_spec.runtimes.llamacpp.library import Library, ModelChoices

_FIRST_PIECE_BYTES = 64


class LibraryTokenizer:
    """Special tokens written out in a text are recognised, none but BOS are added.

    Holds the vocabulary of the file without its weights.
    """

    def __init__(self, library: Library, path: Path, bos_id: int | None) -> None:
        choices = ModelChoices((), 0, mmap=True, vocabulary_only=True)
        known = library.log.num_errors
        model = library.load_model(os.fsencode(path), choices)
        if model is None:
            raise ModelFileError(
                f"{library.name} cannot read the vocabulary of {path}: "
                f"{library.log.errors_after(known)}",
                remedy="Download or convert the file again.",
            )
        weakref.finalize(self, library.free_model, model)
        self._library = library
        self._bos_id = bos_id
        self._vocabulary = library.vocabulary(model)
        self._size = library.vocab_size(model)

    def encode(self, text: str) -> list[int]:
        """Begins with the BOS token where the model asks for one and the text has none."""
        tokens = self._tokens(text)
        if self._bos_id is not None and tokens[:1] != [self._bos_id]:
            tokens.insert(0, self._bos_id)
        return tokens

    def _tokens(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "replace")
        size = len(raw) + 8  # most tokens have a byte or more, and a space may come before
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self._library.tokenize(self._vocabulary, raw, len(raw), ids, size, False, True)
            if count >= 0:
                break
            size = -count  # such as where a space is written as three bytes
        return list(ids[:count])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def stream(self) -> LibraryTextStream:
        return LibraryTextStream(self)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it, special ones included."""
        if not 0 <= token < self._size:
            return ""
        text = self._library.token_text(self._vocabulary, token) or b""
        return text.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary spells so, if it is found in a text."""
        found = self._tokens(text)
        is_whole = len(found) == 1 and self.token_text(found[0]) == text
        return found[0] if is_whole else None

    def special_text(self, token: int) -> str:
        """How a special token is written, which no text shows; "" for other tokens."""
        return "" if self.piece(token) else self.token_text(token)

    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, special ones included, and its id."""
        return {self.token_text(token): token for token in range(self._size)}

    def piece(self, token: int) -> bytes:
        """Returns what the token adds to a text, which may be a part of a character."""
        size = _FIRST_PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.token_to_piece(self._vocabulary, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count


class LibraryTextStream:
    """Turns tokens into text as they come; the pieces join to `decode` of them all."""

    def __init__(self, tokenizer: LibraryTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.piece(token))

    def finish(self) -> str:
        """Returns what is left when no more tokens come: an incomplete character's replacement."""
        return self._decoder.decode(b"", final=True)
