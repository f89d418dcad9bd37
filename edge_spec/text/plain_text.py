"""Encodes texts in which no control token is read, whatever they spell."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from edge_spec.core.text_codec import TextCodec
from edge_spec.text.control_tokens import CONTROL

_SIGN = "\u263a"  # before a text, so that a tokenizer puts no space before the text itself


class PlainText:
    """Makes tokens of texts that stand within a prompt: none begins with the BOS token. Any thread
    may call."""

    def __init__(self, codec: TextCodec, control: Collection[int]) -> None:
        """control: tokens that are not read beside those that the tokenizer calls special, and
        those of the form <|name|>."""
        self._codec = codec
        self.beginning = codec.encode("")  # of every prompt
        self._control = frozenset(control).union(
            token
            for text, (token, is_special) in codec.added_tokens().items()
            if is_special or CONTROL.fullmatch(text)
        )

    def tokens(self, text: str) -> list[int]:
        ids = self._codec.encode_given(text, range(len(text)), self._control)
        return ids[len(self.beginning) :]

    def following(self, text: str) -> list[int]:
        """Returns the tokens of a text that goes on with another one: no space is put before it."""
        if not self._puts_spaces:
            return self.tokens(text)
        sign = self.tokens(_SIGN)
        ids = self.tokens(_SIGN + text)
        return ids[len(sign) :] if ids[: len(sign)] == sign else self.tokens(text)

    @cached_property
    def _puts_spaces(self) -> bool:
        first = self.tokens("a")[:1]
        return bool(first) and self._codec.token_text(first[0]).startswith("\u2581")
