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

    def vocabulary(self) -> dict[str, int]: ...
