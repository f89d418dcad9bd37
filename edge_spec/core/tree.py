"""Drafted tokens as a tree, the one form in which every drafter proposes, and its verdict.

Rows of a tree stand side by side in the cache, so the row before another on its path, which a short
convolution takes in, is not the one before it in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

_NO_PARENT = np.array([-1], np.int32)
_CERTAIN = np.ones(1, np.float32)


class Siblings(StrEnum):
    """Says how the sampled children of one row were drawn, and so how they are verified."""

    WITHOUT_REPLACEMENT = "without-replacement"  # Chen et al. 2024, Sequoia
    WITH_REPLACEMENT = "with-replacement"  # Miao et al. 2024, SpecInfer
    K_SEQ = "k-seq"  # with replacement too, accepted as in Sun et al. 2023, SpecTr


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Tokens to score in one pass. Row 0 is the pending token: chosen, not yet in the KV cache.

    `draft_probs[i]` is the distribution that row i was *sampled* from, or None for a
    deterministic candidate; which of the two decides the acceptance rule. Siblings were sampled
    from the same one in their order, as `siblings` says. A sampled row's confidence may depend on
    its ancestors and on the distributions, never on its own token, and does not rise from one
    sibling to the next: a policy that drops unlikely rows would change what is written.
    `only_child[i]` says whether row i had no siblings when it was drafted, whatever was dropped
    since.
    `proposed_by[i]` names the drafter of row i, several joined by "+" ("" for the pending token).
    `required[i]` marks a row that is scored for what its drafter learns from it, however unlikely
    it is to be right; so are its ancestors. Raises ValueError unless parents precede their children
    and every array has one entry a row.
    """

    tokens: np.ndarray  # [rows] int32
    parents: np.ndarray  # [rows] int32; parents[0] == -1, parents[i] < i
    confidence: np.ndarray  # [rows] float32: estimated P(row accepted | its parent is)
    draft_probs: tuple[np.ndarray | None, ...] = ()  # per row [vocab]; empty: no row was sampled
    proposed_by: tuple[str, ...] = ()
    required: tuple[bool, ...] = ()  # empty: no row is
    siblings: Siblings = Siblings.WITHOUT_REPLACEMENT
    only_child: tuple[bool, ...] = ()  # empty: as in this tree
    is_chain: bool = field(init=False)  # whether each row is the only child of the one before it

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if rows == 0 or len(self.parents) != rows or len(self.confidence) != rows:
            raise ValueError("a token tree needs as many parents and confidences as tokens")
        for name, entries in (
            ("draft_probs", self.draft_probs),
            ("proposed_by", self.proposed_by),
            ("required", self.required),
            ("only_child", self.only_child),
        ):
            if entries and len(entries) != rows:
                raise ValueError(f"a token tree needs no {name} or one entry a row")
        parents = self.parents.tolist()  # every round makes some trees: lists are faster here
        if parents[0] != -1:
            raise ValueError("row 0 of a token tree is the pending token and has no parent")
        object.__setattr__(self, "is_chain", parents == list(range(-1, rows - 1)))
        if not self.is_chain and not all(0 <= parents[row] < row for row in range(1, rows)):
            raise ValueError("a token tree lists each parent before its children")

    @classmethod
    def chain(
        cls,
        pending: int,
        tokens: Sequence[int] = (),
        confidence: Sequence[float] = (),
        drafter: str = "",
        required: bool = False,
    ) -> TokenTree:
        """The pending token followed by `tokens`, each the only child of the one before it."""
        if not len(tokens):  # every plain round
            return cls(np.array([pending], np.int32), _NO_PARENT, _CERTAIN, proposed_by=("",))
        rows = 1 + len(tokens)
        return cls(
            tokens=np.array([pending, *tokens], np.int32),
            parents=np.arange(-1, rows - 1, dtype=np.int32),
            confidence=np.array([1.0, *(confidence or [1.0] * len(tokens))], np.float32),
            proposed_by=("", *(drafter,) * len(tokens)),
            required=(True,) * rows if required else (),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> np.ndarray:
        """[rows] int32; the distance of each row from row 0."""
        rows = len(self.tokens)
        depths = np.arange(rows, dtype=np.int32)
        if not self.is_chain:
            for row in range(1, rows):
                depths[row] = depths[self.parents[row]] + 1
        return depths

    @property
    def leaves(self) -> np.ndarray:
        """Return the rows that have no row below them, ascending."""
        return np.setdiff1d(np.arange(len(self)), self.parents)

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
        return self._children.get(row, [])

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(self.parents.tolist()):
            children.setdefault(parent, []).append(row)
        return children

    def is_sampled(self, row: int) -> bool:
        """Return whether a child of `row` was sampled."""
        if not self.draft_probs:
            return False
        return any(self.draft_probs[child] is not None for child in self.children(row))

    def sampled_chain(self, row: int) -> list[int]:
        """The sampled rows below `row` as long as each is the only child of the one before it.

        One whose siblings were dropped is none: that they were may depend on what it holds, and a
        chain's rule has to be right on average over all that it may hold.
        """
        chain: list[int] = []
        children = self.children(row)
        while (
            len(children) == 1
            and self.draft_probs[children[0]] is not None
            and self._only_child[children[0]]
        ):
            chain.append(children[0])
            children = self.children(children[0])
        return chain

    @cached_property
    def _only_child(self) -> tuple[bool, ...]:
        if self.only_child:
            return self.only_child
        parents = self.parents.tolist()
        return tuple(len(self.children(parent)) == 1 if parent >= 0 else True for parent in parents)

    def path(self, row: int) -> list[int]:
        """Rows from row 0 down to `row`, both included."""
        path = [row]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def child(self, row: int, token: int) -> int | None:
        """The first child of `row` that holds `token`."""
        return self._child_rows.get((row, token))

    @cached_property
    def _child_rows(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        rows: dict[tuple[int, int], int] = {}
        for row, pair in enumerate(pairs):
            rows.setdefault(pair, row)
        return rows

    @cached_property
    def reach(self) -> np.ndarray:
        """[rows] float64; the estimated chance that a row and all its ancestors are accepted."""
        reach: list[float] = self.confidence.tolist()
        reach[0] = 1.0
        for row, parent in enumerate(self.parents.tolist()):
            if row:
                reach[row] *= reach[parent]
        return np.array(reach)

    def followed(self, text: Iterable[int]) -> Iterator[tuple[int, bool]]:
        """Every row whose draft token the text after the pending token decides, and whether it is
        right: the children of the rows that the text passes through."""
        if self.is_chain:  # most rounds
            for child, (candidate, token) in enumerate(
                zip(self.tokens[1:].tolist(), text, strict=False), start=1
            ):
                yield child, candidate == token
                if candidate != token:
                    return
            return
        row: int | None = 0
        for token in text:
            if row is None:
                return
            for child in self.children(row):
                yield child, int(self.tokens[child]) == token
            row = self.child(row, token)

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

    def prepend(self, tokens: Sequence[int]) -> TokenTree:
        """This tree below a chain of `tokens`, which hold its first rows; neither sampled nor
        proposed by anyone."""
        if not tokens:
            return self
        before = len(tokens)
        return TokenTree(
            np.concatenate([np.array(tokens, np.int32), self.tokens]),
            np.concatenate([np.arange(-1, before - 1, dtype=np.int32), self.parents + before]),
            np.concatenate([np.ones(before, np.float32), self.confidence]),
        )

    @property
    def leading_chain(self) -> int:
        """Count the rows, from row 0 on, that are each the child of the one before it."""
        if self.is_chain:
            return len(self)
        return int(np.flatnonzero(self.parents != np.arange(-1, len(self) - 1))[0])

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
            self.required[:rows],
            self.siblings,
            self._only_child[:rows] if self.draft_probs else (),
        )

    def select(self, rows: Sequence[int]) -> TokenTree:
        """The tree of these rows alone, in this order, each after its parent."""
        if list(rows) == list(range(len(self))):
            return self
        index = np.array(rows, np.int64)
        new_rows = np.full(len(self) + 1, -1, np.int32)  # the last entry is row 0's parent
        new_rows[index] = np.arange(len(index))
        return TokenTree(
            self.tokens[index],
            new_rows[self.parents[index]],
            self.confidence[index],
            tuple(self.draft_probs[row] for row in rows) if self.draft_probs else (),
            tuple(self.proposed_by[row] for row in rows) if self.proposed_by else (),
            tuple(self.required[row] for row in rows) if self.required else (),
            self.siblings,
            tuple(self._only_child[row] for row in rows) if self.draft_probs else (),
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round: the tokens that follow the pending one.

    `accepted_rows` is the path of draft tokens that were right, in order; the tokens are theirs
    and, unless the text was cut before it, one more of the target's own choice.
    """

    tokens: tuple[int, ...]
    accepted_rows: tuple[int, ...]
    exhausted: bool  # the path of right ones ended for want of draft tokens, not by a wrong one
    near_ties: int = 0
    first_tie: int | None = None  # the first of the tokens that was a near tie

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


def chain_first(tree: TokenTree, num_rows: int, min_reach: float = 0.0) -> TokenTree:
    """Takes the best chain, up to its last row that is reached with `min_reach` or more, and after
    it the other rows that are required; `num_rows` at most. Rows that can do without are left out.
    """
    reach: list[float] = tree.reach.tolist()
    if tree.is_chain and not tree.required:  # most rounds
        return tree.first_rows(min(num_rows, sum(chance >= min_reach for chance in reach)))
    expected = reach.copy()
    for row, parent in enumerate(tree.parents.tolist()):
        if row:
            expected[row] += expected[parent]
    path = tree.path(expected.index(max(expected)))
    path = [row for row in path if reach[row] >= min_reach][:num_rows]
    others = (row for row, required in enumerate(tree.required) if required and row not in path)
    return tree.select(path + list(others)[: num_rows - len(path)])


def likeliest(tree: TokenTree, num_rows: int, min_reach: float = 0.0) -> TokenTree:
    """Takes the `num_rows` rows that are most likely to be accepted, each with `min_reach` or more.
    Rows that are required go before all others, however unlikely. Siblings of K_SEQ are kept or
    dropped together, by the last of them."""
    if tree.siblings is Siblings.K_SEQ and tree.draft_probs and not tree.is_chain:
        return tree.select(sorted(_likeliest_groups(tree, num_rows, min_reach)))
    reach = tree.reach
    if not tree.required and bool((reach[1:] <= reach[:-1]).all()):
        return tree.first_rows(min(num_rows, int((reach >= min_reach).sum())))
    wanted = np.array(tree.required or (False,) * len(tree))
    wanted[0] = True
    # Stable, and no row is likelier than its parent: parents come before their children.
    order = np.lexsort((-reach, ~wanted))
    rows = [int(row) for row in order if wanted[row] or reach[row] >= min_reach]
    return tree.select(sorted(rows[:num_rows]))


def _likeliest_groups(tree: TokenTree, num_rows: int, min_reach: float) -> list[int]:
    """Return rows whose siblings are all among them. Whether a group is depends on none of its own
    tokens: what is below it, which may depend on them, comes after it."""
    reach: list[float] = tree.reach.tolist()
    least: dict[int, float] = {}  # chance of a row's children, by the least likely on the way
    for row, parent in enumerate(tree.parents.tolist()):
        below = tree.children(row)
        if below:
            least[row] = min(least.get(parent, 1.0), *(reach[child] for child in below))
    kept = [0]
    for row in sorted(least, key=lambda row: (-least[row], row)):
        group = tree.children(row)
        fits = len(kept) + len(group) <= num_rows
        if row in kept and fits and least[row] >= min_reach:
            kept += group
    return kept


NOTHING = -1  # stands before the text


def preceding(parents: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return [count, rows] int64: where the row before each row of a pass is cached, the one
    before that, and so on; NOTHING where the text has begun later.

    parents: [rows] int, of the pass, -1 where it is the last cached token. start: how many tokens
    are cached; the rows of the pass follow them.
    """
    found = np.empty((count, len(parents)), np.int64)
    row = np.asarray(parents, np.int64)
    for distance in range(count):
        found[distance] = row
        row = np.where(row >= 0, parents[np.maximum(row, 0)], row - 1)
    return np.maximum(found + start, NOTHING)


def chain_parents(rows: int) -> np.ndarray:
    """Return [rows] int64: of rows that follow each other."""
    return np.arange(-1, rows - 1)


def parents_seen(sees: np.ndarray) -> np.ndarray:
    """Return [rows] int64: of rows whose paths are `sees` [rows, rows] bool, themselves included;
    each row's parent is the last row before it that it sees."""
    before = np.tril(sees, -1)
    last = len(sees) - 1 - np.argmax(before[:, ::-1], axis=1)
    return np.where(before.any(axis=1), last, -1)
