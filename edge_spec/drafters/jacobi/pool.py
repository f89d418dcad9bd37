"""The n-grams that lookahead decoding has seen, by their first token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_FIRST_TOKENS = 16384


class NgramPool:
    """Keeps for each first token the latest `per_token` n-grams of `ngram` tokens; of first tokens,
    the latest MAX_FIRST_TOKENS. What was seen least lately is forgotten."""

    def __init__(self, ngram: int, per_token: int) -> None:
        self._ngram = ngram
        self._per_token = per_token
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # rests of n-grams, the latest last
        self._read: list[int] = []  # the end of the text, shorter than an n-gram

    def clear(self) -> None:
        self._pool.clear()

    def begin(self, prompt: Sequence[int]) -> None:
        """Reads a prompt, which the text to come goes on from."""
        self._read = []
        self.read(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """tokens: an n-gram."""
        first, rest = tokens[0], tuple(tokens[1:])
        known = self._pool.pop(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self._per_token]
        self._pool[first] = known
        if len(self._pool) > MAX_FIRST_TOKENS:
            del self._pool[next(iter(self._pool))]

    def read(self, text: Sequence[int]) -> None:
        """Adds the n-grams of what follows the text that was read so far."""
        tokens = [*self._read, *text]
        for start in range(len(tokens) - self._ngram + 1):
            self.add(tokens[start : start + self._ngram])
        self._read = tokens[max(0, len(tokens) - self._ngram + 1) :]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Returns what followed a token, each ngram - 1 tokens long, the latest first."""
        return self._pool.get(token, [])[::-1]

    def snapshot(self) -> np.ndarray:
        """[n-grams, ngram] int32, the least lately seen first."""
        ngrams = [(first, *rest) for first, rests in self._pool.items() for rest in rests]
        return np.array(ngrams, np.int32).reshape(-1, self._ngram)

    def restore(self, ngrams: np.ndarray) -> None:
        """Raises ValueError for n-grams of another length and for what are none."""
        if ngrams.ndim != 2 or ngrams.shape[1] != self._ngram or ngrams.dtype.kind != "i":
            raise ValueError(
                f"{ngrams.dtype} of shape {ngrams.shape} for a pool of {self._ngram}-grams"
            )
        self.clear()
        for tokens in ngrams.tolist():
            self.add(tokens)
