"""Draft tokens as a tree, the form of all proposals, and the verdict on it. Rows are adjacent in
the cache, so a row's parent, which a short convolution reads, need not be the row before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

_NO_PARENT = np.array([-1], np.int32)
_CERTAIN = np.ones(1, np.float32)


class Siblings(StrEnum):
    """How a row's sampled children were drawn, and so how to verify them."""

    WITHOUT_REPLACEMENT = "without-replacement"  # Chen et al. 2024, Sequoia
    WITH_REPLACEMENT = "with-replacement"  # Miao et al. 2024, SpecInfer
    K_SEQ = "k-seq"  # with replacement, accepted as in Sun et al. 2023, SpecTr


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Tokens to score in one pass. Row 0 is the pending token: chosen, but not yet in the KV cache.

    `draft_probs[i]` is the distribution that row i was *sampled* from, None for a deterministic
    candidate; the acceptance rule depends on which. Siblings were sampled from one distribution, in
    order, as `siblings` says. A sampled row's confidence may depend on its ancestors and on
    distributions, never on its own token, and must not rise from one sibling to the next: otherwise
    a policy that drops unlikely rows would change the text.

    `only_child[i]`: row i had no siblings when drafted, whatever was dropped since.
    `proposed_by[i]`: row i's drafter, several joined by "+"; "" for the pending token.
    `required[i]`: row i and its ancestors are scored even if unlikely, because the drafter learns
    from them.

    Raises ValueError unless parents precede children and every array has one entry a row.
    """

    tokens: np.ndarray  # [rows] int32
    parents: np.ndarray  # [rows] int32; parents[0] == -1, parents[i] < i
    confidence: np.ndarray  # [rows] float32: estimated P(row accepted | parent accepted)
    draft_probs: tuple[np.ndarray | None, ...] = ()  # each [vocab]; empty: no row was sampled
    proposed_by: tuple[str, ...] = ()
    required: tuple[bool, ...] = ()  # empty: none
    siblings: Siblings = Siblings.WITHOUT_REPLACEMENT
    only_child: tuple[bool, ...] = ()  # empty: as in this tree
    is_chain: bool = field(init=False)  # each row is the only child of the previous one

    def __post_init__(self) -> None:
        if self.parents is _NO_PARENT and self.confidence is _CERTAIN:  # by `chain`: a plain step
            object.__setattr__(self, "is_chain", True)
            return
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
        parents = self.parents.tolist()  # trees are built every round, and lists are faster here
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
        """Return the pending token with `tokens` as a chain below."""
        if not len(tokens):  # plain rounds
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
        """Return [rows] int32, distances from row 0."""
        rows = len(self.tokens)
        depths = np.arange(rows, dtype=np.int32)
        if not self.is_chain:
            for row in range(1, rows):
                depths[row] = depths[self.parents[row]] + 1
        return depths

    @property
    def leaves(self) -> np.ndarray:
        """Return the rows without children, ascending."""
        return np.setdiff1d(np.arange(len(self)), self.parents)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Return [rows, rows] bool; ancestors[i, j]: row i attends to row j (itself included)."""
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
        if not self.draft_probs:
            return False
        return any(self.draft_probs[child] is not None for child in self.children(row))

    def sampled_chain(self, row: int) -> list[int]:
        """Return the sampled rows below `row` while each is an only child.

        A row whose siblings were dropped ends the chain: that may depend on its token, and a
        chain's rule must be right on average over all tokens.
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
        """Return the rows from row 0 to `row`, inclusive."""
        path = [row]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def child(self, row: int, token: int) -> int | None:
        """Return the first child of `row` with this token."""
        if self.is_chain:
            below = row + 1
            return below if below < len(self.tokens) and self.tokens[below] == token else None
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
        """Return [rows] float64: estimated probability that a row and its ancestors are
        accepted."""
        reach: list[float] = self.confidence.tolist()
        reach[0] = 1.0
        for row, parent in enumerate(self.parents.tolist()):
            if row:
                reach[row] *= reach[parent]
        return np.array(reach)

    def followed(self, text: Iterable[int]) -> Iterator[tuple[int, bool]]:
        """Yield each row that `text`, after the pending token, decides, and whether it is right."""
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
        """Return a tree of `rows` rows, with a chain of dummy tokens below the last."""
        extra = rows - len(self)
        if extra <= 0:
            return self
        return TokenTree(
            np.append(self.tokens, np.zeros(extra, np.int32)),
            np.append(self.parents, np.arange(len(self) - 1, rows - 1, dtype=np.int32)),
            np.append(self.confidence, np.zeros(extra, np.float32)),
        )

    def prepend(self, tokens: Sequence[int]) -> TokenTree:
        """Return this tree below a chain of `tokens`; no row is sampled, proposed or required."""
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
        """Count the leading rows that form a chain."""
        if self.is_chain:
            return len(self)
        return int(np.flatnonzero(self.parents != np.arange(-1, len(self) - 1))[0])

    def first_rows(self, rows: int) -> TokenTree:
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
        """Return the tree of these rows, in order, each after its parent."""
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
    """Outcome of one round. `accepted_rows` is the path of right draft tokens; `tokens` are theirs
    plus one of the target's choice, unless the text was cut before it."""

    tokens: tuple[int, ...]
    accepted_rows: tuple[int, ...]
    exhausted: bool  # drafts ran out, none was wrong
    near_ties: int = 0
    first_tie: int | None = None  # index in `tokens`

    @property
    def kept(self) -> tuple[int, ...]:
        """Rows to commit: the pending one, and all tokens' but the last."""
        return (0, *self.accepted_rows)[: len(self.tokens)]

    @property
    def next_token(self) -> int:
        return self.tokens[-1]

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_rows)

    def first_tokens(self, count: int) -> Verdict:
        """Return the verdict as if the text had ended after `count` tokens."""
        if count >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:count], accepted_rows=self.accepted_rows[:count])


def chain_first(tree: TokenTree, num_rows: int, min_reach: float = 0.0) -> TokenTree:
    """Select the best chain while its reach is at least `min_reach`, then other required rows; at
    most `num_rows`."""
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
    """Select the `num_rows` likeliest rows with a reach of at least `min_reach`, required ones
    first, however unlikely. K_SEQ siblings are kept or dropped together, by the least likely."""
    if tree.siblings is Siblings.K_SEQ and tree.draft_probs and not tree.is_chain:
        return tree.select(sorted(_likeliest_groups(tree, num_rows, min_reach)))
    reach = tree.reach
    if not tree.required and bool((reach[1:] <= reach[:-1]).all()):
        return tree.first_rows(min(num_rows, int((reach >= min_reach).sum())))
    wanted = np.array(tree.required or (False,) * len(tree))
    wanted[0] = True
    # Stable; no row is likelier than its parent, so parents come first.
    order = np.lexsort((-reach, ~wanted))
    rows = [int(row) for row in order if wanted[row] or reach[row] >= min_reach]
    return tree.select(sorted(rows[:num_rows]))


def _likeliest_groups(tree: TokenTree, num_rows: int, min_reach: float) -> list[int]:
    """Return rows with all their siblings. Whether a group is kept does not depend on its own
    tokens: descendants, which may, come later."""
    reach: list[float] = tree.reach.tolist()
    least: dict[int, float] = {}  # lowest reach among a row's children and groups above
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


NOTHING = -1  # before the text's beginning


def preceding(parents: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return [count, rows] int64: cache indices of each row's predecessor, of that one's, and so
    on; NOTHING before the text. parents: [rows] int of the pass; -1: the last cached token. start:
    cached tokens, which the rows follow."""
    found = np.empty((count, len(parents)), np.int64)
    row = np.asarray(parents, np.int64)
    for distance in range(count):
        found[distance] = row
        row = np.where(row >= 0, parents[np.maximum(row, 0)], row - 1)
    return np.maximum(found + start, NOTHING)


def chain_parents(rows: int) -> np.ndarray:
    """Return [rows] int64, the parents of a chain."""
    return np.arange(-1, rows - 1)


def parents_seen(sees: np.ndarray) -> np.ndarray:
    """Return [rows] int64: parents from `sees` [rows, rows] bool, each row's path with itself."""
    before = np.tril(sees, -1)
    last = len(sees) - 1 - np.argmax(before[:, ::-1], axis=1)
    return np.where(before.any(axis=1), last, -1)
