"""Bytes and names of single tokens, and incremental decoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from edge_spec.core.text_codec import TextCodec

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# GPT-2's stand-ins for bytes: printable Latin-1 stands for itself, the others start at U+0100.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}


class TokenPiece(NamedTuple):
    """A token in a list. raw: the bytes that it adds within a text, maybe part of a character; None
    for a token without text, such as a special one, listed by name."""

    name: str
    raw: bytes | None

    @classmethod
    def of_bytes(cls, raw: bytes) -> TokenPiece:
        return cls(shown(raw), raw)


def shown(raw: bytes) -> str:
    r"""Decode bytes; incomplete characters appear as in OpenAI's API: "\xf0\x9f"."""
    return raw.decode("utf-8", "backslashreplace")


class TokenPieces:
    """The pieces of one tokenizer's tokens, cached. Any thread may ask."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.of = cache(self._of)
        # Reading a large vocabulary takes a third of a second.
        self.spelled_with = cache(self._spelled_with)

    def _of(self, token: int) -> TokenPiece:
        if raw := self.codec.piece(token):
            return TokenPiece.of_bytes(raw)
        return TokenPiece(self.codec.token_text(token) or f"token_id:{token}", None)

    def _spelled_with(self, letter: str) -> tuple[int, ...]:
        return tuple(token for text, token in self.codec.vocabulary().items() if letter in text)


def spelled_bytes(spelled: str) -> bytes:
    """Return the bytes of a token spelled in GPT-2's stand-ins, or as <0xF0>."""
    if found := _BYTE.fullmatch(spelled):
        return bytes([int(found[1], 16)])
    if BYTES.keys() >= set(spelled):
        return bytes(map(BYTES.__getitem__, spelled))
    return spelled.encode()


class ByteStream:
    """Turns tokens into text as they come. A character that spans tokens appears with its last one;
    incomplete bytes become one replacement character, as in llama.cpp's servers."""

    def __init__(self, piece: Callable[[int], bytes], first: Callable[[int], bytes]) -> None:
        """piece: a token's bytes within a text; first: at its beginning."""
        self._piece = piece
        self._first = first
        self._is_begun = False
        self._held = ""  # ends in an incomplete character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        added = self._piece(token)
        if added and not self._is_begun:
            self._is_begun = True
            added = self._first(token)
        self._held += self._decoder.decode(added)
        return "" if self._decoder.getstate()[0] else self._take()

    def finish(self) -> str:
        """Return an incomplete character's replacement."""
        self._held += self._decoder.decode(b"", final=True)
        return self._take()

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
