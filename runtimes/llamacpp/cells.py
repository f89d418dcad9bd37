"""The conversations in one context of llama.cpp, and which of its cells they have.

Where a row's bits follow from the tokens before it (`invariant_rows`), they do as long as these are
in cells in their order, in which attention adds them up: it skips the cells of others. A row of a
tree is behind its parent, so trees keep the order, too. The library puts new tokens into the first
free cells. So no cell before the last one in use is ever free: what is rejected there stays in the
sequence HELD, which nobody reads, as long as the context lives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.batch import ContextOutputs
from edge_spec.runtimes.llamacpp.features import Features, KeysValues
from edge_spec.runtimes.llamacpp.library import ContextChoices
from edge_spec.runtimes.llamacpp.weights import GgufWeights, OpenContext

# Of a context that keeps the order of tokens: each has room for the scores of as many rows.
NUM_SEQUENCES = MAX_ROWS + 2
HELD, PADDING = NUM_SEQUENCES - 1, NUM_SEQUENCES - 2


class PendingRows(NamedTuple):
    """The rows of a conversation's last pass. numbers: the sequence of each leaf."""

    tree: TokenTree
    cells: Sequence[int]
    numbers: Sequence[int]


@dataclass(eq=False)
class CacheSequence:
    """One conversation's tokens.

    outcome: how many tokens it has, and which rows of its last pass are among them, None before it
    has chosen. has_rows: whether it may choose. Its own thread sets them, at any time; all else is
    changed by whoever holds the cache's lock.
    """

    home: Context
    number: int
    cells: list[int] = field(default_factory=list)  # of its tokens, ascending
    outcome: tuple[int, Sequence[int] | None] = (0, ())
    has_rows: bool = False
    pending: PendingRows | None = None
    is_closed: bool = False
    features: Features | None = None  # that are collected
    keys_values: KeysValues | None = None  # that someone reads

    @property
    def length(self) -> int:
        return self.outcome[0]

    @property
    def is_undecided(self) -> bool:
        return self.pending is not None and self.outcome[1] is None and not self.is_closed

    @property
    def needs_final_states(self) -> bool:
        """Whether those of all of its rows are collected, unscored ones included."""
        return self.features is not None and self.features.has_final

    def hold(self, length: int) -> None:
        """Note that its first `length` tokens are in the cache, and nothing else."""
        self.cells, self.pending, self.outcome = list(range(length)), None, (length, ())


class SequenceRows(NamedTuple):
    """What a conversation has in a pass."""

    sequence: CacheSequence
    tree: TokenTree
    is_scored: bool = True


class Context:
    """One context of the library, and which of its cells are in use."""

    def __init__(self, weights: GgufWeights, opened: OpenContext, choices: ContextChoices) -> None:
        self.handle, self.free = opened
        self.choices = choices
        self.tail = 0  # all cells before it are in use, none after it
        self.is_broken = False  # whether cells may be others than those that are noted
        self.viewer: CacheSequence | None = None  # whose last scores are in the library's buffers
        self.outputs = ContextOutputs(weights, self.handle, choices.steady_rows)
        self.memory: int = weights.library.memory(self.handle)
        count = choices.num_sequences or choices.max_rows
        self._keeps_order = keeps_order(choices)
        self._held_end = 0  # the cell after the last one in HELD
        self._free_numbers = list(range(count - 2 * self._keeps_order - 1, -1, -1))
        self._stale_numbers: list[int] = []  # of sequences that are still to be removed

    def has_numbers(self, count: int) -> bool:
        return count <= len(self._free_numbers)

    def take_numbers(self, count: int) -> list[int]:
        return [self._free_numbers.pop() for _ in range(count)]

    def give_back(self, numbers: Sequence[int]) -> None:
        """What these sequences have is removed before the next pass."""
        self._stale_numbers += numbers

    def take_chain(self, library: Any, sequence: CacheSequence) -> bool:
        """Settle the last pass of the only conversation here, if it was a chain and all before it
        is kept; returns whether that is so."""
        pending, cells, length = sequence.pending, sequence.cells, sequence.length
        kept = length - len(cells)
        if sequence.is_closed or self.is_broken or not self.free.alive or kept < 0:
            return False
        offered = () if pending is None else pending.cells
        if kept > len(offered) or (pending is not None and not pending.tree.is_chain):
            return False
        if kept < len(offered):
            library.sequence_remove(self.memory, sequence.number, length, -1)
        cells.extend(offered[:kept])
        sequence.pending = None
        self.tail = len(cells)
        if self._keeps_order and cells:
            self.tail = max(self._held_end, cells[-1] + 1)
        return True

    def begin(
        self, library: Any, sequence: CacheSequence, tree: TokenTree, cells: Sequence[int]
    ) -> list[int]:
        """Begin a pass over a tree, in these cells; returns the sequences of its leaves."""
        numbers = [sequence.number]
        if not tree.is_chain:
            numbers += self.take_numbers(len(tree.leaves) - 1)
        sequence.outcome = (sequence.length, None)
        sequence.pending = PendingRows(tree, cells, numbers)
        for number in numbers[1:]:
            library.sequence_copy(self.memory, sequence.number, number, -1, -1)
        return numbers

    def settle(
        self, library: Any, sequences: Sequence[CacheSequence], joining: Sequence[CacheSequence]
    ) -> None:
        """Keep what the sequences have chosen of their last passes and drop all else.

        An interrupt may come anywhere: then it is done again. sequences: all that are here.
        joining: those whose next pass it is, which have given up what they have not chosen."""
        decided = [each for each in sequences if each in joining or not each.is_undecided]
        kept = [self._kept_cells(each) for each in decided]
        if self._keeps_order:
            ends = [cells[-1] + 1 for cells in kept if cells]
            waiting = [each.pending for each in sequences if each not in decided]
            ends += [pending.cells[-1] + 1 for pending in waiting if pending is not None]
            self.tail = max(self._held_end, *ends, 0)
        for each in decided:
            if each.pending is not None and not each.pending.tree.is_chain:
                self._keep_branch(library, each)
            elif each.pending is not None:
                each.cells.extend(each.pending.cells)
                each.pending = None
            self._cut(library, each)
        for number in self._stale_numbers:
            library.sequence_remove(self.memory, number, -1, -1)
        self._free_numbers += self._stale_numbers
        self._stale_numbers = []
        if not self._keeps_order:
            self.tail = sum(len(each.cells) for each in sequences)
            self.is_broken = False

    def _kept_cells(self, sequence: CacheSequence) -> Sequence[int]:
        """Return the cells of the tokens that it keeps, or only the last ones of them."""
        length, chosen = (0, ()) if sequence.is_closed else sequence.outcome
        known, pending = len(sequence.cells), sequence.pending
        if length <= known or pending is None:
            return sequence.cells[length - 1 : length] if length else ()
        if pending.tree.is_chain:
            return pending.cells[: length - known]
        return [pending.cells[row] for row in chosen or ()][: length - known]

    def _keep_branch(self, library: Any, sequence: CacheSequence) -> None:
        """Make the path that was chosen of a tree the sequence's own."""
        assert sequence.pending is not None
        tree, cells, numbers = sequence.pending
        rows, own, start = list(sequence.outcome[1] or ()), sequence.number, len(sequence.cells)
        kept = own
        for leaf, number in zip(tree.leaves.tolist(), numbers, strict=True):
            path = tree.path(leaf)
            shared = sum(row in rows for row in path)  # with the kept path: the first ones
            if rows and shared == len(rows):
                kept = number if kept == own else kept
            self._hold(library, number, start + shared, [cells[row] for row in path[shared:]])
        if kept != own:
            library.sequence_remove(self.memory, own, start, -1)
            library.sequence_copy(self.memory, kept, own, start, start + len(rows))
        else:
            library.sequence_remove(self.memory, own, start + len(rows), -1)
        sequence.cells.extend(cells[row] for row in rows)
        # In one statement, so that an interrupt finds all of it done, or none.
        self._stale_numbers, sequence.pending = [*self._stale_numbers, *numbers[1:]], None

    def _cut(self, library: Any, sequence: CacheSequence) -> None:
        """Give up the cells after its last token."""
        length, cells = 0 if sequence.is_closed else sequence.length, sequence.cells
        if len(cells) > length or self.is_broken:
            self._hold(library, sequence.number, length, cells[length:])
            library.sequence_remove(self.memory, sequence.number, length, -1)
            del cells[length:]

    def _hold(self, library: Any, number: int, position: int, cells: Sequence[int]) -> None:
        """Hold what a sequence has from this position on in these cells, before the tail."""
        held = bisect_left(cells, self.tail) if self._keeps_order else 0
        if held:
            library.sequence_copy(self.memory, number, HELD, position, position + held)
            self._held_end = max(self._held_end, cells[held - 1] + 1)


def keeps_order(choices: ContextChoices) -> bool:
    """Return whether tokens of a conversation have to be in cells in their order."""
    return choices.invariant_rows and not choices.kept_states
