"""Turns text into tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Text to tokens and back: `Tokenizer`, or what a runtime brings for its own files."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def stream(self) -> TextPieces: ...

    def token_text(self, token: int) -> str: ...

    def token_id(self, text: str) -> int | None: ...

    def special_text(self, token: int) -> str:
        """How a special token is written, which no text shows; "" for other tokens."""

    def vocabulary(self) -> dict[str, int]: ...
