"""Lookahead decoding: a window of Jacobi trajectories that fills a pool of n-grams
(Fu et al. 2024).

The window has W columns and N - 1 rows. Its row 0 is a chain from the pending token on; below
each of its columns hangs a trajectory, whose row r is what the target wrote r rounds ago at that
place. That is a token tree, so the window needs no attention mask of its own. Each round scores
window and guesses in one pass: the argmax of the last window row makes the newest row, every
column yields an n-gram for the pool, and the pool's n-grams that begin with the pending token are
the guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.conversation import continues
from edge_spec.drafters.fill import Fill, Filler
from edge_spec.drafters.growth import Growth, nothing
from edge_spec.drafters.merge import merge_rows, tree_of
from edge_spec.drafters.ngram_pool import NgramPool
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import UsageError
from edge_spec.model import Forward
from edge_spec.tree import TokenTree, Verdict


@dataclass(frozen=True)
class WindowSize:
    """W columns, n-grams of N tokens, at most G guesses a round. Raises UsageError for sizes that
    make no window."""

    width: int
    ngram: int
    guesses: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.ngram < 2 or self.guesses < 1:
            raise UsageError(
                f"a lookahead window of {self} is too small",
                remedy="Give W,N,G: W at least 1, N at least 2, G at least 1.",
            )

    def __str__(self) -> str:
        return f"{self.width},{self.ngram},{self.guesses}"

    @property
    def num_rows(self) -> int:
        """Of one pass at most, the pending token included."""
        return (self.ngram - 1) * (self.width + self.guesses)

    @classmethod
    def parse(cls, text: str) -> WindowSize:
        """ "W,N,G". Raises UsageError."""
        try:
            width, ngram, guesses = (int(part) for part in text.split(","))
        except ValueError:
            raise UsageError(
                f"{text!r} is no size of a lookahead window",
                remedy="Give three numbers W,N,G, such as 3,3,3.",
            ) from None
        return cls(width, ngram, guesses)

    @classmethod
    def within(cls, num_rows: int) -> WindowSize:
        """What a pass of so many rows has room for, half of it for the window."""
        ngram = 2 if num_rows < 8 else 3 if num_rows < 24 else 4 if num_rows < 48 else 5
        columns = max(2, num_rows // (ngram - 1))
        return cls(columns // 2, ngram, columns - columns // 2)


# Kinds of guess: window rows by their depth in the tree (1, 2, 3 or more), then the pool's by how
# lately they were seen (first, second, third, later) and by whether they are an n-gram's first
# token. Measured over greedy texts of a 135M chat model.
_WINDOW_DEPTHS, _POOL_RANKS = 3, 4
_PRIORS = (0.15, 0.25, 0.35, 0.40, 0.60, 0.15, 0.45, 0.10, 0.40, 0.06, 0.40)

DEFAULT_SIZE = WindowSize(2, 3, 2)


class LookaheadDrafter:
    name = "lookahead"

    def __init__(
        self, size: WindowSize = DEFAULT_SIZE, fill: Fill = Fill.RANDOM, seed: int = 0
    ) -> None:
        self._size = size
        self._filler = Filler(fill, seed)
        self._acceptance = LearntAcceptance(_PRIORS)
        self._pool = NgramPool(size.ngram, size.guesses)
        self._prompt: tuple[int, ...] = ()
        # _levels[r][j]: row r, column j; row 0 begins with the pending token, which is not read.
        self._levels: list[list[int]] = []
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        """Keeps the pool if the prompt continues the conversation."""
        if not continues(self._prompt, prompt):
            self._pool.clear()
        self._prompt = tuple(prompt)
        self._growth = nothing(prompt[-1])
        self._filler.begin(prompt)
        self._pool.begin(prompt)
        self._levels = [self._filler.fill([], self._size.width)]

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        # A window too deep for what is left of the text, or too large, has nothing to give.
        size, depth = self._size, self._size.width + len(self._levels) - 2
        with_window = (
            budget.branches
            and depth <= budget.num_draft_tokens
            and size.width * len(self._levels) <= budget.num_rows
        )
        trees = [self._window(pending)] if with_window else []
        kinds = [[min(d, _WINDOW_DEPTHS) - 1 for d in tree.depths.tolist()] for tree in trees]
        for rank, ngram in enumerate(self._pool.after(pending)):
            guesses = ngram[: budget.num_draft_tokens]
            trees.append(TokenTree.chain(pending, guesses, drafter=self.name))
            first = _WINDOW_DEPTHS + 2 * min(rank, _POOL_RANKS - 1)
            kinds.append([0, first, *(first + 1,) * (len(guesses) - 1)])
            if not budget.branches:
                break
        merged = merge_rows(pending, trees)
        best = [
            max((kinds[which][row] for which, row in entry.sources), key=self._acceptance.estimate)
            if entry.sources
            else 0
            for entry in merged
        ]
        tree = tree_of(merged, [self._acceptance.estimate(kind) for kind in best])
        self._growth = Growth(tree, best)
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._filler.extend(verdict.tokens)
        self._pool.read(verdict.tokens)
        newest = self._newest_level(tree, out)
        if newest is None:  # a round without the window leaves it as it is, and behind
            self._refresh(self._levels, len(verdict.tokens))
            return
        levels = [*self._levels, newest]
        if len(levels) < self._size.ngram:
            self._refresh(levels, len(verdict.tokens))
            return
        levels[0][0] = int(tree.tokens[0])
        for column in zip(*levels, strict=True):
            self._pool.add(column)
        # Without its first row every trajectory stands one position further right.
        self._refresh(levels[1:], len(verdict.tokens) - 1)

    def snapshot(self) -> dict[str, np.ndarray]:
        """The pool and what was learnt; the window is rebuilt within N rounds."""
        return {
            "acceptance": self._acceptance.snapshot(),
            "prompt": np.array(self._prompt, np.int32),
            "pool": self._pool.snapshot(),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self._acceptance.restore(state["acceptance"])
        self._pool.restore(state["pool"])
        self._prompt = tuple(state["prompt"].tolist())

    def _window(self, pending: int) -> TokenTree:
        tokens, parents = [pending], [-1]
        foot = [0] * self._size.width  # each column's last row

        def add(token: int, parent: int) -> int:
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        for column in range(1, self._size.width):
            foot[column] = add(self._levels[0][column], foot[column - 1])
        for level in self._levels[1:]:
            foot = [add(token, parent) for token, parent in zip(level, foot, strict=True)]
        rows = len(tokens)
        return TokenTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.ones(rows, np.float32),
            proposed_by=("", *(self.name,) * (rows - 1)),
            needed=(True,) * rows,
        )

    def _newest_level(self, tree: TokenTree, out: Forward) -> list[int] | None:
        """The target's choice below each column, None where the window was not scored."""
        newest = []
        foot: int | None = 0
        for column in range(self._size.width):
            if column:
                foot = tree.child(foot, self._levels[0][column])
            row = foot
            for level in self._levels[1:]:
                row = None if row is None else tree.child(row, level[column])
            if foot is None or row is None:
                return None
            newest.append(int(out.logits[row].argmax()))
        return newest

    def _refresh(self, levels: list[list[int]], num_tokens: int) -> None:
        """Moves the window's columns on by `num_tokens` positions; new ones are filled."""
        width = self._size.width
        self._levels = []
        for level in levels:
            kept = level[num_tokens:]
            self._levels.append(kept + self._filler.fill(kept, width - len(kept)))
