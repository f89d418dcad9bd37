"""What is noted of each conversation in a cache that several have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.core.tree import TokenTree


@dataclass
class WrittenRows:
    """What a conversation's last pass has written. branches: the first sequence of each row, and
    all sequences of a tree beside the conversation's own; None for a chain."""

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
    last: WrittenRows | None = None
    has_left: bool = False

    @property
    def is_undecided(self) -> bool:
        return self.last is not None and self.outcome[1] is None and not self.has_left

    @property
    def num_cells(self) -> int:
        return len(self.cells) + (len(self.last.cells) if self.last else 0)

    @property
    def end(self) -> int:
        """The cell after those that it may go on to need."""
        cells = [*self.cells[-1:], *(self.last.cells if self.last else ())]
        return max(cells, default=-1) + 1


def sequences_of_rows(
    tree: TokenTree, leaves: np.ndarray, numbers: Sequence[int]
) -> list[list[int]]:
    """Returns for each row the sequences of the leaves below it. numbers: of each leaf's."""
    below = tree.ancestors[leaves].T  # [rows, leaves]
    return [[numbers[leaf] for leaf in np.flatnonzero(row).tolist()] for row in below]
