"""The branches of a tree in the cache of one session: sequences beside the committed one, TEXT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.library import Library

TEXT = 0
# A tree that is no chain has fewer leaves than rows, so that none of its branches has this number.
HELD = MAX_ROWS - 1


class Branches:
    """Branches share the cells of their common prefix, as in llama.cpp's examples/speculative.

    keeps_order: whether the tokens of the text stand in the cells in their order, which attention
    adds them up in. The library puts new tokens into the first free cells, so rejected rows that
    stand before kept ones are not given up then: they stay in the sequence HELD, which nobody
    reads, until the text is written to an empty cache. No cell before the text's last one is free.
    """

    def __init__(self, library: Library, keeps_order: bool) -> None:
        self.num_held = 0  # cells that may be in HELD
        self._library = library
        self._keeps_order = keeps_order
        self._tree: TokenTree | None = None  # whose rows are not committed
        self._sequences = np.empty(0, np.int32)  # [rows] the first one of each

    def __bool__(self) -> bool:
        """Says whether there are any but the text."""
        return self._tree is not None

    def begin(self, memory: int, tree: TokenTree, sequences: np.ndarray) -> None:
        """Has each branch begin with the text. sequences: [rows] the first one of each."""
        self._tree, self._sequences = tree, sequences
        for sequence in range(1, self._count):
            self._library.sequence_copy(memory, TEXT, sequence, -1, -1)

    def commit(self, memory: int, rows: Sequence[int], length: int) -> None:
        """Adds these rows to a text of `length` tokens, and forgets the branches."""
        library, kept = self._library, int(self._sequences[rows[-1]])
        if self._keeps_order:
            self._hold(memory, rows, length)
        # An interrupt may come between any two of these: the committed tokens never leave the
        # text, and what else is left in it is removed before the next pass.
        if kept != TEXT:
            library.sequence_remove(memory, TEXT, length, -1)
            library.sequence_copy(memory, kept, TEXT, length, length + len(rows))
        self.drop(memory)

    def drop(self, memory: int) -> None:
        """Forgets all of them but the text."""
        if self._tree is None:
            return
        if self._keeps_order:
            for sequence in range(1, self._count):
                self._library.sequence_remove(memory, sequence, -1, -1)
        else:
            self._library.sequence_keep(memory, TEXT)
        self._tree = None

    def empty(self, memory: int) -> None:
        """Forgets the text, too."""
        self.drop(memory)
        for sequence in (TEXT, HELD) if self._keeps_order else (TEXT,):
            self._library.sequence_remove(memory, sequence, -1, -1)
        self.num_held = 0

    def moved(self) -> None:
        """Is told that the text alone has moved to another cache."""
        self._tree, self.num_held = None, 0

    @property
    def _count(self) -> int:
        return int(self._sequences.max()) + 1

    def _hold(self, memory: int, rows: Sequence[int], length: int) -> None:
        """Holds the rejected rows that stand before the last kept one."""
        assert self._tree is not None
        for leaf in self._tree.leaves.tolist():
            before = [row for row in self._tree.path(leaf) if row <= rows[-1]]
            shared = sum(row in rows for row in before)  # with the kept path: the first ones
            if shared < len(before):
                branch, ends = int(self._sequences[leaf]), (length + shared, length + len(before))
                self._library.sequence_copy(memory, branch, HELD, *ends)
                self.num_held += len(before) - shared
