"""Protocols that turn text into tokens and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Turns tokens into text incrementally."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Text to tokens and back: `Tokenizer`, or a runtime's own for its files."""

    def encode(self, text: str) -> list[int]:
        """Encode text, reading all added tokens that it spells, special ones included."""

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
        """Like `encode`, but read no token of `control` that includes a given character; there it
        is plain text. given: indices of characters, ascending."""

    def added_tokens(self) -> Mapping[str, tuple[int, bool]]:
        """Return added tokens, read as one token wherever a text spells them: text to (id, is
        special)."""

    @property
    def reads_variants(self) -> bool:
        """Return whether added tokens have other spellings, such as in other case."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> bytes:
        """Return a token's bytes within a text, maybe part of a character; b"" if special."""

    def stream(self) -> TextPieces: ...

    def token_text(self, token: int) -> str: ...

    def token_id(self, text: str) -> int | None: ...

    def special_text(self, token: int) -> str:
        """Return a special token's text, which decoding omits; "" for other tokens."""

    def vocabulary(self) -> dict[str, int]: ...
