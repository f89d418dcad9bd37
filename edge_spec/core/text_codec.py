"""Turns text into tokens and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Text to tokens and back: `Tokenizer`, or what a runtime brings for its own files."""

    def encode(self, text: str) -> list[int]:
        """Reads each added token that the text spells, special ones included."""

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
        """Does the same, but reads no token of `control` where a given character takes part in it:
        there it is text like any other. given: places of characters, in order."""

    def added_tokens(self) -> Mapping[str, tuple[int, bool]]:
        """Return what is one token wherever a text spells it: by its text, its id, and whether it
        is special."""

    @property
    def reads_variants(self) -> bool:
        """Return whether an added token may be spelled otherwise, such as in other letters."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> bytes:
        """Returns what the token adds within a text, maybe a part of a character; special: b""."""

    def stream(self) -> TextPieces: ...

    def token_text(self, token: int) -> str: ...

    def token_id(self, text: str) -> int | None: ...

    def special_text(self, token: int) -> str:
        """Return how a special token is written, which no text shows; "" for other tokens."""

    def vocabulary(self) -> dict[str, int]: ...
