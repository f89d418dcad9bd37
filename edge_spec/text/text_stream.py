"""Turns tokens into text as they come, without showing what later ones change."""

from __future__ import annotations

import codecs
from collections.abc import Callable

import tokenizers
from tokenizers.decoders import DecodeStream


class ByteStream:
    """Joins the bytes of tokens: a character appears with the last of its bytes, and where it lacks
    some, one replacement stands for it, as llama.cpp's servers show it."""

    def __init__(self, piece: Callable[[int], bytes], first: Callable[[int], bytes]) -> None:
        """piece: the bytes that a token adds within a text; first: at the beginning of one."""
        self._piece = piece
        self._first = first
        self._is_begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        added = self._piece(token)
        if added and not self._is_begun:
            self._is_begun = True
            added = self._first(token)
        return self._decoder.decode(added)

    def finish(self) -> str:
        """Returns what is left when no more tokens come: an incomplete character's replacement."""
        return self._decoder.decode(b"", final=True)


class DecodedStream:
    """Turns tokens into text as they come; the pieces join to what the library decodes of
    them all.

    A character that spans tokens appears with the last of them.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_characters = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # bytes that turn out to be no character change the text before them
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self.finish()
        self._num_characters += len(piece)
        return piece

    def finish(self) -> str:
        """Returns what is left when no more tokens come: an incomplete character's replacement."""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[self._num_characters :]
