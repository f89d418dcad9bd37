"""The notes on each conversation in a cache that several have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_spec.core.tree import TokenTree

if TYPE_CHECKING:
    from edge_spec.runtimes.llamacpp.features import Features


@dataclass
class WrittenRows:
    """The rows that a conversation's last pass has written. branches: the first sequence of each
    row, and all sequences of a tree beside the conversation's own; None for a chain."""

    cells: list[int]
    branches: np.ndarray | None = None
    numbers: Sequence[int] = ()


@dataclass(eq=False)
class Member:
    """One conversation in the cache.

    outcome: how many tokens it has, and which rows of its last pass are among them, None before it
    has chosen. Its own thread sets that, at any time; all else is changed between passes.
    """

    number: int  # of its sequence
    cells: list[int]  # of its tokens, ascending
    outcome: tuple[int, Sequence[int] | None]
    features: Features | None = None  # that are collected of it
    last: WrittenRows | None = None
    has_left: bool = False

    @property
    def is_undecided(self) -> bool:
        return self.last is not None and self.outcome[1] is None and not self.has_left

    @property
    def needs_final_states(self) -> bool:
        """Says whether those of all of its rows are collected, unscored ones included."""
        return self.features is not None and self.features.has_final

    @property
    def num_cells(self) -> int:
        return len(self.cells) + (len(self.last.cells) if self.last else 0)

    @property
    def end(self) -> int:
        """The cell after those that it may go on to need."""
        cells = [*self.cells[-1:], *(self.last.cells if self.last else ())]
        return max(cells, default=-1) + 1

    def lay_out(
        self, tree: TokenTree, branches: Sequence[int]
    ) -> list[tuple[int, int, Sequence[int]]]:
        """Begins a pass over a tree; returns token, position and sequences of each row. branches:
        numbers of sequences for its leaves but the first; none for a chain."""
        self.outcome = (self.outcome[0], None)
        self.last = WrittenRows([])
        sequences: list[list[int]] = [[self.number]] * len(tree)
        if not tree.is_chain:
            sequences = _sequences_of_rows(tree, [self.number, *branches])
            self.last.numbers = branches
            self.last.branches = np.array([each[0] for each in sequences])
        positions = (len(self.cells) + tree.depths).tolist()
        return list(zip(tree.tokens.tolist(), positions, sequences, strict=True))


class JointRows(NamedTuple):
    """Describes what a conversation has in a pass."""

    member: Member
    tree: TokenTree
    is_scored: bool = True


def _sequences_of_rows(tree: TokenTree, numbers: Sequence[int]) -> list[list[int]]:
    """Returns for each row the sequences of the leaves below it. numbers: of each leaf's."""
    below = tree.ancestors[tree.leaves].T  # [rows, leaves]
    return [[numbers[leaf] for leaf in np.flatnonzero(row).tolist()] for row in below]
