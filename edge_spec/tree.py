"""Guessed tokens as a tree, the one form in which every drafter proposes, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

_NO_PARENT = np.array([-1], np.int32)
_CERTAIN = np.ones(1, np.float32)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Tokens to score in one pass. Row 0 is the pending token: chosen, not yet in the KV cache.

    `draft_probs[i]` is the distribution that row i was *sampled* from, or None for a
    deterministic candidate; which of the two decides the acceptance rule. `proposed_by[i]` names
    the drafter of row i ("" for the pending token). Raises ValueError unless parents precede
    their children and every array has one entry a row.
    """

    tokens: np.ndarray  # [rows] int32
    parents: np.ndarray  # [rows] int32; parents[0] == -1, parents[i] < i
    confidence: np.ndarray  # [rows] float32: estimated P(row accepted | its parent is)
    draft_probs: tuple[np.ndarray | None, ...] = ()  # per row [vocab]; empty: no row was sampled
    proposed_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if rows == 0 or len(self.parents) != rows or len(self.confidence) != rows:
            raise ValueError("a token tree needs as many parents and confidences as tokens")
        if self.draft_probs and len(self.draft_probs) != rows:
            raise ValueError("a token tree needs no draft_probs or one entry a row")
        if self.proposed_by and len(self.proposed_by) != rows:
            raise ValueError("a token tree needs no proposed_by or one entry a row")
        if self.parents[0] != -1:
            raise ValueError("row 0 of a token tree is the pending token and has no parent")
        if rows > 1 and not self.is_chain:
            below = self.parents[1:]
            if (below < 0).any() or (below >= np.arange(1, rows)).any():
                raise ValueError("a token tree lists each parent before its children")

    @classmethod
    def chain(
        cls,
        pending: int,
        tokens: Sequence[int] = (),
        confidence: Sequence[float] = (),
        drafter: str = "",
    ) -> TokenTree:
        """The pending token followed by `tokens`, each the only child of the one before it."""
        if not len(tokens):  # every plain round
            plain = cls(np.array([pending], np.int32), _NO_PARENT, _CERTAIN, proposed_by=("",))
            plain.__dict__["is_chain"] = True
            return plain
        rows = 1 + len(tokens)
        return cls(
            tokens=np.array([pending, *tokens], np.int32),
            parents=np.arange(-1, rows - 1, dtype=np.int32),
            confidence=np.array([1.0, *(confidence or [1.0] * len(tokens))], np.float32),
            proposed_by=("", *(drafter,) * len(tokens)),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        rows = len(self.tokens)
        return rows == 1 or bool((self.parents == np.arange(-1, rows - 1)).all())

    @cached_property
    def depths(self) -> np.ndarray:
        """[rows] int32; the distance of each row from row 0."""
        rows = len(self.tokens)
        depths = np.arange(rows, dtype=np.int32)
        if not self.is_chain:
            for row in range(1, rows):
                depths[row] = depths[self.parents[row]] + 1
        return depths

    @cached_property
    def ancestors(self) -> np.ndarray:
        """[rows, rows] bool; ancestors[i, j]: row i attends to row j (itself included)."""
        rows = len(self.tokens)
        sees = np.eye(rows, dtype=bool)
        for row in range(1, rows):
            sees[row] |= sees[self.parents[row]]
        return sees

    def children(self, row: int) -> list[int]:
        if self.is_chain:
            return [row + 1] if row + 1 < len(self.tokens) else []
        return [int(child) for child in np.flatnonzero(self.parents == row)]

    def path(self, row: int) -> list[int]:
        """Rows from row 0 down to `row`, both included."""
        path = [row]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def padded(self, rows: int) -> TokenTree:
        """A tree of `rows` rows: these, then a chain of meaningless tokens below the last."""
        extra = rows - len(self)
        if extra <= 0:
            return self
        return TokenTree(
            np.append(self.tokens, np.zeros(extra, np.int32)),
            np.append(self.parents, np.arange(len(self) - 1, rows - 1, dtype=np.int32)),
            np.append(self.confidence, np.zeros(extra, np.float32)),
        )

    def first_chain(self) -> TokenTree:
        """The leading rows that form a chain."""
        forks = np.flatnonzero(self.parents != np.arange(-1, len(self) - 1))
        return self.first_rows(int(forks[0])) if len(forks) else self

    def first_rows(self, rows: int) -> TokenTree:
        """The tree of the first `rows` rows, itself a tree since parents precede children."""
        if rows >= len(self):
            return self
        return TokenTree(
            self.tokens[:rows],
            self.parents[:rows],
            self.confidence[:rows],
            self.draft_probs[:rows],
            self.proposed_by[:rows],
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round: the tokens that follow the pending one.

    `accepted_rows` is the path of guesses that were right, in order; the tokens are theirs and,
    unless the text was cut before it, one more of the target's own choice.
    """

    tokens: tuple[int, ...]
    accepted_rows: tuple[int, ...]
    exhausted: bool  # the path of right guesses ended for want of guesses, not by a wrong one
    near_ties: int = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """Rows to commit: the pending one and those of all tokens but the last."""
        return (0, *self.accepted_rows)[: len(self.tokens)]

    @property
    def next_token(self) -> int:
        return self.tokens[-1]

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_rows)

    def first_tokens(self, count: int) -> Verdict:
        """The verdict as if the text had ended after `count` tokens."""
        if count >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:count], accepted_rows=self.accepted_rows[:count])
