"""Protocols that turn text into tokens and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Turns tokens into text incrementally."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """`Tokenizer`, or a runtime's own for its files."""

    def encode(self, text: str) -> list[int]:
        """Encode text with all added tokens that it spells, special ones included."""

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
        """Like `encode`, but leave tokens of `control` that include a given character as plain
        text. given: indices of characters, ascending."""

    def added_tokens(self) -> Mapping[str, tuple[int, bool]]:
        """Return tokens that any text can spell, by text: id, and whether special."""

    @property
    def reads_variants(self) -> bool:
        """Return whether added tokens have other spellings, such as other case."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> bytes:
        """Return a token's bytes, maybe part of a character; b"" if special."""

    def stream(self) -> TextPieces: ...

    def token_text(self, token: int) -> str: ...

    def token_id(self, text: str) -> int | None: ...

    def special_text(self, token: int) -> str:
        """Return a special token's text, which decoding omits; "" for others."""

    def vocabulary(self) -> dict[str, int]: ...
