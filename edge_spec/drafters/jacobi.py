"""Lookahead decoding (Fu et al. 2024) and Jacobi decoding (Santilli et al. 2023).

Lookahead: row 0 of a window with W columns and N - 1 rows is a chain from the pending token; below
each column hangs a trajectory that the target wrote in successive rounds, newest last. This token
tree needs no attention mask of its own. Each round scores window and draft tokens in one pass: the
argmax of the last row becomes the newest row, every column yields an n-gram for a pool, and n-grams
that begin with the pending token are the draft tokens.

Jacobi: each round verifies a block as a chain and commits what was right; the argmax at the other
positions becomes the next block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from random import Random

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.modes import JacobiInit
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict, likeliest
from edge_spec.drafters.protocol import (
    GREEDY,
    TRAITS,
    Budget,
    continues,
    restored_prompt,
)
from edge_spec.drafters.tree_builder import (
    Growth,
    LearningDrafter,
    LearntAcceptance,
    TreeRows,
    nothing,
)
from edge_spec.errors import UsageError


class Filler:
    """Fills positions after a growing text. Deterministic for a text and seed."""

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
        """Return `count` draft tokens to follow the text (not empty) and then `ahead`."""
        if self._fill == JacobiInit.RANDOM:
            return self._random.choices(self._text, k=count)
        before = [*self._text[-2:], *ahead]
        for _ in range(count):
            last = before[-1]
            pair = (before[-2], last) if len(before) > 1 else (last, last)
            # Repeat a token that nothing has followed: as good a guess as any.
            before.append(self._after.get(pair, self._after.get(last, last)))
        return before[len(before) - count :]


MAX_FIRST_TOKENS = 16384


class NgramPool:
    """Keeps the latest `per_token` n-grams of `ngram` tokens for each of MAX_FIRST_TOKENS first
    tokens. Drops what was seen least recently."""

    def __init__(self, ngram: int, per_token: int) -> None:
        self._ngram = ngram
        self._per_token = per_token
        # by first token: rests of n-grams, latest last
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._read: list[int] = []  # end of the text, shorter than an n-gram

    def clear(self) -> None:
        self._pool.clear()

    def begin(self, prompt: Sequence[int]) -> None:
        self._read = []
        self.read(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Add one n-gram."""
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
        """Add the n-grams of the text's continuation."""
        tokens = [*self._read, *text]
        for start in range(len(tokens) - self._ngram + 1):
            self.add(tokens[start : start + self._ngram])
        self._read = tokens[max(0, len(tokens) - self._ngram + 1) :]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return what followed a token, each ngram - 1 tokens long, latest first."""
        return self._pool.get(token, [])[::-1]

    def snapshot(self) -> np.ndarray:
        """Return [n-grams, ngram] int32, least recently seen first."""
        ngrams = [(first, *rest) for first, rests in self._pool.items() for rest in rests]
        return np.array(ngrams, np.int32).reshape(-1, self._ngram)

    def restore(self, ngrams: np.ndarray) -> None:
        """Load a snapshot. Raises ValueError for another length or kind of array."""
        if ngrams.ndim != 2 or ngrams.shape[1] != self._ngram or ngrams.dtype.kind != "i":
            raise ValueError(
                f"{ngrams.dtype} of shape {ngrams.shape} for a pool of {self._ngram}-grams"
            )
        self.clear()
        for tokens in ngrams.tolist():
            self.add(tokens)


@dataclass(frozen=True)
class WindowSize:
    """W columns, n-grams of N tokens, at most G n-grams a round. Raises UsageError if too small."""

    width: int
    ngram: int
    draft_tokens: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.ngram < 2 or self.draft_tokens < 1:
            raise UsageError(
                f"a lookahead window of {self} is too small",
                remedy="Give W,N,G: W at least 1, N at least 2, G at least 1.",
            )

    def __str__(self) -> str:
        return f"{self.width},{self.ngram},{self.draft_tokens}"

    @property
    def num_rows(self) -> int:
        """Return the most rows of one pass, including the pending token's."""
        return (self.ngram - 1) * (self.width + self.draft_tokens)

    @classmethod
    def parse(cls, text: str) -> WindowSize:
        """Parse "W,N,G". Raises UsageError."""
        try:
            width, ngram, draft_tokens = (int(part) for part in text.split(","))
        except ValueError:
            raise UsageError(
                f"{text!r} is no size of a lookahead window",
                remedy="Give three numbers W,N,G, such as 3,3,3.",
            ) from None
        return cls(width, ngram, draft_tokens)

    @classmethod
    def within(cls, num_rows: int) -> WindowSize:
        """Return a size that fits a pass of `num_rows`, half of it for the window."""
        ngram = 2 if num_rows < 8 else 3 if num_rows < 24 else 4 if num_rows < 48 else 5
        columns = max(2, num_rows // (ngram - 1))
        return cls(columns // 2, ngram, columns - columns // 2)


# Kinds of draft token: window rows by depth (1, 2, 3 or more), pool tokens by recency and whether
# they come first in an n-gram. Priors measured over greedy texts of a 135M chat model.
_WINDOW_DEPTHS, _POOL_RANKS = 3, 4
_PRIORS = (0.02, 0.13, 0.20, 0.34, 0.74, 0.28, 0.72, 0.12, 0.60, 0.06, 0.50)

DEFAULT_SIZE = WindowSize(2, 3, 2)


class LookaheadDrafter(LearningDrafter):
    name = "lookahead"
    traits = TRAITS["lookahead"]

    def __init__(
        self, size: WindowSize = DEFAULT_SIZE, fill: JacobiInit = JacobiInit.RANDOM, seed: int = 0
    ) -> None:
        super().__init__(_PRIORS)
        self._size = size
        self._filler = Filler(fill, seed)
        self._pool = NgramPool(size.ngram, size.draft_tokens)
        self._prompt: tuple[int, ...] = ()
        # _levels[r][j]: row r, column j: a draft token for position j + r, from the pending token
        # at 0.
        self._levels: list[list[int]] = []

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Keep the pool if the prompt continues the conversation."""
        if not continues(self._prompt, prompt):
            self._pool.clear()
        self._prompt = tuple(prompt)
        super().begin(prompt, sampler)
        self._filler.begin(prompt)
        self._pool.begin(prompt)
        self._levels = [[]]
        self._refresh(0, prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        rows = _Rows(pending, self.name, self._acceptance)
        # A window too deep for the rest of the text, or too large, is left out.
        depth = self._size.width + len(self._levels) - 2
        num_rows = self._size.width * len(self._levels)
        if budget.probes and depth <= budget.num_draft_tokens and num_rows <= budget.num_rows:
            self._add_window(rows)
        ngrams = self._pool.after(pending)
        for rank, ngram in enumerate(ngrams if budget.branches else ngrams[:1]):
            kind, row = _WINDOW_DEPTHS + 2 * min(rank, _POOL_RANKS - 1), 0
            for i, token in enumerate(ngram[: budget.num_draft_tokens]):
                row = rows.draft(row, token, kind + (i > 0))
        self._growth = rows.growth()
        tree = self._growth.tree
        return likeliest(tree, budget.num_rows) if len(tree) > budget.num_rows else tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._filler.extend(verdict.tokens)
        self._pool.read(verdict.tokens)
        num_tokens = len(verdict.tokens)
        newest = self._newest_level(tree, out)
        if newest is not None:  # without the window it stays as it is, and behind
            self._levels.append(newest)
        if len(self._levels) == self._size.ngram:
            for column in zip(*self._levels, strict=True):
                self._pool.add(column)
            # Without its first row every trajectory moves one position to the right.
            del self._levels[0]
            num_tokens -= 1
        self._refresh(num_tokens, verdict.next_token)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        """Return the pool and what was learnt; the window is rebuilt within N rounds."""
        learnt = super().state(learnt_only)
        if learnt_only:
            return learnt
        return {
            **learnt,
            "prompt": np.array(self._prompt, np.int32),
            "pool": self._pool.snapshot(),
        }

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load a snapshot; changes nothing if it raises."""
        if learnt_only:
            return super().load(state, learnt_only)
        pool = NgramPool(self._size.ngram, self._size.draft_tokens)
        pool.restore(state["pool"])
        prompt = restored_prompt(state["prompt"])
        super().load(state)
        self._pool, self._prompt = pool, prompt

    def _add_window(self, rows: _Rows) -> None:
        feet = [0]  # each column's last row
        for token in self._levels[0][1:]:
            kind = min(len(feet), _WINDOW_DEPTHS) - 1
            feet.append(rows.draft(feet[-1], token, kind, required=True))
        for r, level in enumerate(self._levels[1:], start=1):
            for column, token in enumerate(level):
                kind = min(column + r, _WINDOW_DEPTHS) - 1
                feet[column] = rows.draft(feet[column], token, kind, required=True)

    def _newest_level(self, tree: TokenTree, out: Forward) -> list[int] | None:
        """Return the target's choice below each column; None if the window was not scored."""
        newest = []
        foot: int | None = 0
        for column, (start, *trajectory) in enumerate(zip(*self._levels, strict=True)):
            foot = _follow(tree, foot, [start] if column else [])
            last = _follow(tree, foot, trajectory)
            if last is None:
                return None
            newest.append(int(out.logits[last].argmax()))
        return newest

    def _refresh(self, num_tokens: int, pending: int) -> None:
        """Advance the window by `num_tokens` positions and fill new columns."""
        width, fill = self._size.width, self._filler.fill
        first, *others = self._levels
        kept = first[num_tokens + 1 :]
        self._levels = [[pending, *kept, *fill(kept, width - 1 - len(kept))]]
        below: list[int] = []  # between the pending token and a row's first column
        for level in others:
            kept = level[num_tokens:]
            self._levels.append([*kept, *fill([*below, *kept], width - len(kept))])
            below.append(self._levels[-1][0])


def _follow(tree: TokenTree, row: int | None, tokens: Sequence[int]) -> int | None:
    """Return the row that `tokens` lead to; None if it was not scored."""
    for token in tokens:
        if row is None:
            return None
        row = tree.child(row, token)
    return row


class _Rows(TreeRows):
    """The rows of one round's tree, each of its likeliest kind."""

    def __init__(self, pending: int, drafter: str, acceptance: LearntAcceptance) -> None:
        super().__init__(pending)
        self._drafter = drafter
        self._estimate = acceptance.estimate
        self._kinds = [0]

    def draft(self, parent: int, token: int, kind: int, required: bool = False) -> int:
        row = self.add(parent, token, self._drafter, required)
        if row == len(self._kinds):
            self._kinds.append(kind)
        self._kinds[row] = max(self._kinds[row], kind, key=self._estimate)
        return row

    def growth(self) -> Growth:
        return Growth(self.tree(list(map(self._estimate, self._kinds))), self._kinds)


DEFAULT_BLOCK = 3  # draft tokens
_SEEDED, _ITERATED = range(2)  # origins of a draft token
_SPARE_PRIORS = (0.01, 0.09)  # measured over greedy texts of a 135M chat model


class _Drafted(IntEnum):
    FILLED = 0
    REFINED = 1  # changed by an argmax
    STABLE = 2  # confirmed by an argmax


# By origin: first of its block, and below a right one. Measured over greedy texts of a 135M chat
# model.
_JACOBI_PRIORS = ((0.22, 0.50), (0.05, 0.10), (0.08, 0.08))


class JacobiDrafter(LearningDrafter):
    """Jacobi decoding. block: most draft tokens per round."""

    name = "jacobi"
    traits = TRAITS["jacobi"]

    def __init__(
        self, fill: JacobiInit = JacobiInit.NGRAM, block: int = DEFAULT_BLOCK, seed: int = 0
    ) -> None:
        super().__init__([prior for pair in _JACOBI_PRIORS for prior in pair])
        self._block = block
        self._filler = Filler(fill, seed)
        # From the position after the pending token.
        self._draft_tokens: list[tuple[int, _Drafted]] = []

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._draft_tokens = []
        super().begin(prompt, sampler)
        self._filler.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        count = min(self._block, budget.num_draft_tokens, budget.num_rows - 1)
        if count <= 0:
            return TokenTree.chain(pending)
        known = [token for token, _ in self._draft_tokens]
        filled = self._filler.fill(known, count - len(known)) if count > len(known) else []
        self._draft_tokens += [(token, _Drafted.FILLED) for token in filled]
        kinds = [0, *(2 * made + (i > 0) for i, (_, made) in enumerate(self._draft_tokens[:count]))]
        chain = TokenTree.chain(
            pending,
            [token for token, _ in self._draft_tokens[:count]],
            [self._acceptance.estimate(kind) for kind in kinds[1:]],
            self.name,
            required=True,
        )
        self._growth = Growth(chain, kinds)
        return chain

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._filler.extend(verdict.tokens)
        refined: list[tuple[int, _Drafted]] = []  # for the position after each scored draft token
        row = 0
        for i, (token, _) in enumerate(self._draft_tokens):
            scored = tree.child(row, token)
            if scored is None:
                break
            row = scored
            argmax = int(out.logits[row].argmax())
            same = i + 1 < len(self._draft_tokens) and self._draft_tokens[i + 1][0] == argmax
            refined.append((argmax, _Drafted.STABLE if same else _Drafted.REFINED))
        # The row of draft token i - 1 refines the draft token at position i.
        updated = [*self._draft_tokens[:1], *refined, *self._draft_tokens[len(refined) + 1 :]]
        self._draft_tokens = updated[len(verdict.tokens) :]


class SpareRowDrafter(LearningDrafter):
    """Proposes one token for a free second row of a padded plain step, else nothing.

    Jacobi iteration over a block of one: the target's choice after a wrong guess is the next guess.
    One in twelve is right.
    """

    name = "spare-row"

    def __init__(self) -> None:
        super().__init__(_SPARE_PRIORS)
        self._known: int | None = None  # guess for what follows the pending token

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._known = None
        super().begin(prompt, sampler)
        self._acceptance.begin_text()

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if budget.free_rows < 2 or min(budget.num_draft_tokens, budget.num_rows - 1) < 1:
            self._growth = nothing(pending)
            return self._growth.tree
        # Any token will do: the target's choice after it is the next guess.
        kind, token = _ITERATED, self._known
        if token is None:
            kind, token = _SEEDED, pending
        chain = TokenTree.chain(pending, [token], [self._acceptance.estimate(kind)], self.name)
        self._growth = Growth(chain, (0, kind))
        return chain

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        wrong = len(verdict.accepted_rows) + 1  # of a chain
        known = tree.is_chain and wrong < len(tree)
        self._known = int(out.logits[wrong].argmax()) if known else None

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        """Return only what was learnt: after a restore there may be no spare row."""
        return super().state(learnt_only) if learnt_only else {}
