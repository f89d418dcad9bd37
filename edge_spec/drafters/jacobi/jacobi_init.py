"""Initial tokens for positions that nothing is known about yet (Jacobi blocks, windows)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from random import Random

from edge_spec.errors import UsageError


class JacobiInit(StrEnum):
    """Says how the first draft tokens are made."""

    RANDOM = "random"  # any token of the text, as Fu et al. 2024 do
    REPEAT_LAST = "repeat-last"
    NGRAM = "ngram"  # what followed the last two tokens, or the last one, when they came before

    @classmethod
    def parse(cls, text: str) -> JacobiInit:
        """Raises UsageError."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(
                f"initial tokens cannot be made by {text!r}", remedy=f"Choose: {', '.join(cls)}."
            ) from None


class Filler:
    """Fills positions after a text that grows. The same text and seed give the same draft
    tokens."""

    def __init__(self, fill: JacobiInit, seed: int = 0) -> None:
        self._fill = fill
        self._seed = seed
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        self._random = Random(self._seed)
        self._text: list[int] = []
        self._after: dict[int | tuple[int, int], int] = {}  # the token after one or two others
        self.extend(prompt)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._fill == JacobiInit.NGRAM and self._text:
                self._after[self._text[-1]] = token
                if len(self._text) > 1:
                    self._after[self._text[-2], self._text[-1]] = token
            self._text.append(token)

    def fill(self, ahead: Sequence[int], count: int) -> list[int]:
        """`count` draft tokens for what follows the text and then `ahead`; the text is not
        empty."""
        if self._fill == JacobiInit.RANDOM:
            return self._random.choices(self._text, k=count)
        before = [*self._text[-2:], *ahead]
        for _ in range(count):
            last = before[-1]
            pair = (before[-2], last) if len(before) > 1 else (last, last)
            # A token that was never followed by another: repeated, as good a draft token as any.
            before.append(self._after.get(pair, self._after.get(last, last)))
        return before[len(before) - count :]
