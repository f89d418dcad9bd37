"""A llama.cpp context: its batch, scores and the cells of its conversations.

With `invariant_rows`, a row's bits follow from the tokens before it if these are in cells in order,
as attention sums cell by cell; a tree's rows follow their parents. New tokens go into the first
free cells, so none may be free before the last used one: rejected tokens there stay in the unread
sequence HELD.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.library import NAME, ContextChoices
from edge_spec.runtimes.llamacpp.weights import GgufWeights

if TYPE_CHECKING:
    from edge_spec.runtimes.llamacpp.features import Features, KeysValues

# Of a context that keeps token order; each has room for its rows' scores.
NUM_SEQUENCES = MAX_ROWS + 1
HELD = NUM_SEQUENCES - 1
WHOLE, RECURRENT = 0, 1  # llama_state_seq_flags: all layers, or recurrent ones


class Batch:
    """The tokens of a pass. `struct`, a `llama_batch`, points into its arrays, which are written in
    place and live as long as this."""

    def __init__(self, batch_type: type[ctypes.Structure], num_tokens: int) -> None:
        self._tokens = np.zeros(num_tokens, np.int32)
        self._positions = np.zeros(num_tokens, np.int32)
        self._num_sequences = np.ones(num_tokens, np.int32)
        self._sequences = np.zeros((num_tokens, MAX_ROWS), np.int32)
        starts = np.arange(num_tokens, dtype=np.uintp) * np.uintp(self._sequences.strides[0])
        self._starts = np.uintp(self._sequences.ctypes.data) + starts
        self._scored = np.ones(num_tokens, np.int8)
        struct: Any = batch_type()
        kinds = dict(struct._fields_)
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._num_sequences),
            ("seq_id", self._starts),
            ("logits", self._scored),
        ):
            setattr(struct, name, ctypes.cast(array.ctypes.data, kinds[name]))
        self.struct = struct

    def put(
        self,
        rows: slice | np.ndarray,
        tree: TokenTree,
        position: int,
        numbers: Sequence[int],
        is_scored: bool,
    ) -> None:
        """Write a tree to these rows. numbers: each leaf's sequence, shared by the rows above
        it."""
        self._tokens[rows] = tree.tokens
        self._positions[rows] = tree.depths + position if len(tree) > 1 else position
        self._scored[rows] = is_scored
        self._num_sequences[rows] = 1
        self._sequences[rows, 0] = numbers[0]
        if tree.is_chain:
            return
        below: list[list[int]] = [[] for _ in range(len(tree))]
        for leaf, number in zip(tree.leaves.tolist(), numbers, strict=True):
            for row in tree.path(leaf):
                below[row].append(number)
        for row, own in zip(np.arange(len(self._tokens))[rows], below, strict=True):
            self._num_sequences[row] = len(own)
            self._sequences[row, : len(own)] = own

    def outputs(self, num_rows: int) -> np.ndarray:
        """Return each row's index among the scored rows, [rows]."""
        outputs: np.ndarray = np.cumsum(self._scored[:num_rows]) - 1
        return outputs


class PendingRows(NamedTuple):
    """The rows of a conversation's last pass. numbers: each leaf's sequence."""

    tree: TokenTree
    cells: Sequence[int]
    numbers: Sequence[int]


@dataclass(eq=False)
class CacheSequence:
    """A conversation's tokens.

    outcome: its length and the chosen rows of its last pass, None before the choice. has_rows:
    whether it may choose. Its own thread sets these; the cache's lock protects the rest.
    """

    home: Context
    number: int
    cells: list[int] = field(default_factory=list)  # of its tokens, ascending
    outcome: tuple[int, Sequence[int] | None] = (0, ())
    has_rows: bool = False
    pending: PendingRows | None = None
    is_closed: bool = False
    features: Features | None = None  # to collect
    keys_values: KeysValues | None = None  # to share

    @property
    def length(self) -> int:
        return self.outcome[0]

    @property
    def is_undecided(self) -> bool:
        return self.pending is not None and self.outcome[1] is None and not self.is_closed

    @property
    def needs_final_states(self) -> bool:
        """Whether even unscored rows need final states."""
        return self.features is not None and self.features.has_final

    def hold(self, length: int) -> None:
        """Record that the cache holds only the first `length` tokens."""
        self.cells, self.pending, self.outcome = list(range(length)), None, (length, ())


class Context:
    """A context, freed with its weights or when unreferenced."""

    def __init__(self, weights: GgufWeights, choices: ContextChoices) -> None:
        """Raises SessionError, DeviceMemoryError if the cache does not fit."""
        self._weights = weights
        self.choices = choices
        self.handle, self.free = weights.open_context(self, choices)
        library = weights.library
        self.memory: int = library.llama_get_memory(self.handle)
        self._switch_steady = library.steady_switch(self.handle) if choices.steady_rows else None
        self._is_single = False
        self._gives_hidden: bool | None = False
        self._logits: int | None = None  # address of the last pass's
        # By address of the logits: the library keeps their buffer, which hidden states share.
        self._forwards: dict[tuple[int | None, int, bool | None], Forward] = {}
        self.tail = 0  # all cells before it are used, none after
        self.is_broken = False  # whether cells may differ from the records
        self.viewer: CacheSequence | None = None  # whose scores are in the library's buffers
        self._keeps_order = keeps_order(choices)
        self._held_end = 0  # after the last cell in HELD
        count = choices.num_sequences - self._keeps_order
        self._free_numbers = list(range(count - 1, -1, -1))
        self._stale_numbers: list[int] = []  # of sequences yet to be removed

    # Passes

    def want_steady(self, is_single: bool) -> None:
        """Prepare for one row or several; with `steady_rows` both compute alike."""
        if self._switch_steady is not None and is_single != self._is_single:
            self._switch_steady(is_single)
            self._is_single = is_single

    def want_hidden(self, wanted: bool) -> None:
        if self._weights.gives_final_states and wanted != self._gives_hidden:
            self._gives_hidden = None
            self._weights.library.llama_set_embeddings(self.handle, wanted)
            self._gives_hidden = wanted

    def decode(self, batch: Any, is_scored: bool) -> int:
        """Make a pass; return 0, or 1 if no cell is free, or another error. is_scored: `scores`
        follows, so one change of threads does for both."""
        library = self._weights.library
        made: tuple[int, int | None] = library.run(_decode, library, self.handle, batch, is_scored)
        status, self._logits = made
        return status

    def wait(self) -> None:
        """Wait for passes, which devices run asynchronously."""
        self._weights.library.llama_synchronize(self.handle)

    def scores(self, rows: int) -> Forward:
        """Return the last pass's scores in the library's buffers."""
        start = self._logits
        key = start, rows, self._gives_hidden
        if key not in self._forwards:
            logits = _view(start, rows, self._weights.vocab_size)
            self._forwards[key] = Forward(logits, self.hidden(rows) if self._gives_hidden else None)
        return self._forwards[key]

    def hidden(self, rows: int) -> np.ndarray:
        start = self._weights.library.llama_get_embeddings(self.handle)
        return _view(start, rows, self._weights.hidden_size)

    # Sequences

    def remove(self, number: int, start: int = -1, end: int = -1) -> bool:
        """Remove positions [start, end) of a sequence; -1: from the first, to the last. Return
        False if the library cannot."""
        return bool(self._weights.library.llama_memory_seq_rm(self.memory, number, start, end))

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        self._weights.library.llama_memory_seq_cp(self.memory, source, target, start, end)

    def first_position(self, number: int) -> int:
        """Return a sequence's first position still cached; -1: none."""
        return int(self._weights.library.llama_memory_seq_pos_min(self.memory, number))

    def read(self, number: int, part: int = WHOLE) -> np.ndarray:
        """Return a sequence as [bytes] uint8 in the library's format."""
        library = self._weights.library
        size = library.llama_state_seq_get_size_ext(self.handle, number, part)
        buffer = (ctypes.c_uint8 * size)()
        written = library.llama_state_seq_get_data_ext(self.handle, buffer, size, number, part)
        sequence: np.ndarray = np.ctypeslib.as_array(buffer)[:written]
        return sequence

    def write(self, sequence: np.ndarray, number: int, part: int = WHOLE) -> None:
        """Replace a sequence by one that `transfer` has checked. Raises ValueError if the library
        refuses it."""
        writable = np.require(sequence, requirements=("C", "W"))  # from_buffer needs both
        size = len(sequence)
        buffer = (ctypes.c_uint8 * size).from_buffer(writable.data)
        library = self._weights.library
        taken = library.llama_state_seq_set_data_ext(self.handle, buffer, size, number, part)
        if taken != size:
            raise ValueError(f"{NAME} read {taken} of {size} bytes")

    def has_numbers(self, count: int) -> bool:
        return count <= len(self._free_numbers)

    def take_numbers(self, count: int) -> list[int]:
        return [self._free_numbers.pop() for _ in range(count)]

    def give_back(self, numbers: Sequence[int]) -> None:
        """Free these sequences before the next pass."""
        self._stale_numbers += numbers

    # Cells

    def begin(self, sequence: CacheSequence, tree: TokenTree, cells: Sequence[int]) -> list[int]:
        """Begin a pass over a tree in these cells; return its leaves' sequences."""
        numbers = [sequence.number]
        if not tree.is_chain:
            numbers += self.take_numbers(len(tree.leaves) - 1)
        sequence.outcome = (sequence.length, None)
        sequence.pending = PendingRows(tree, cells, numbers)
        for number in numbers[1:]:
            self.copy(sequence.number, number)
        return numbers

    def settle(self, sequences: Sequence[CacheSequence], joining: Sequence[CacheSequence]) -> None:
        """Keep the chosen rows of the last passes and drop all others; can be repeated after an
        interrupt. sequences: all here. joining: those that start a pass, whose unchosen rows are
        dropped."""
        decided = [each for each in sequences if each in joining or not each.is_undecided]
        kept = [self._kept_cells(each) for each in decided]
        if self._keeps_order:
            ends = [cells[-1] + 1 for cells in kept if cells]
            waiting = [each.pending for each in sequences if each not in decided]
            ends += [pending.cells[-1] + 1 for pending in waiting if pending is not None]
            self.tail = max(self._held_end, *ends, 0)
        for each in decided:
            if each.pending is not None and not each.pending.tree.is_chain:
                self._keep_branch(each)
            elif each.pending is not None:
                each.cells.extend(each.pending.cells)
                each.pending = None
            self._cut(each)
        for number in self._stale_numbers:
            self.remove(number)
        self._free_numbers += self._stale_numbers
        self._stale_numbers = []
        if not self._keeps_order:
            self.tail = sum(len(each.cells) for each in sequences)
            self.is_broken = False

    def _kept_cells(self, sequence: CacheSequence) -> Sequence[int]:
        """Return the kept tokens' cells, or only the last of them."""
        length, chosen = (0, ()) if sequence.is_closed else sequence.outcome
        known, pending = len(sequence.cells), sequence.pending
        if length <= known or pending is None:
            return sequence.cells[length - 1 : length] if length else ()
        if pending.tree.is_chain:
            return pending.cells[: length - known]
        return [pending.cells[row] for row in chosen or ()][: length - known]

    def _keep_branch(self, sequence: CacheSequence) -> None:
        """Give a tree's chosen path to the sequence itself."""
        assert sequence.pending is not None
        tree, cells, numbers = sequence.pending
        rows, own, start = list(sequence.outcome[1] or ()), sequence.number, len(sequence.cells)
        kept = own
        for leaf, number in zip(tree.leaves.tolist(), numbers, strict=True):
            path = tree.path(leaf)
            shared = sum(row in rows for row in path)  # a common prefix
            if rows and shared == len(rows):
                kept = number if kept == own else kept
            self._hold(number, start + shared, [cells[row] for row in path[shared:]])
        if kept != own:
            self.remove(own, start)
            self.copy(kept, own, start, start + len(rows))
        else:
            self.remove(own, start + len(rows))
        sequence.cells.extend(cells[row] for row in rows)
        # One statement, so that an interrupt leaves all or nothing done.
        self._stale_numbers, sequence.pending = [*self._stale_numbers, *numbers[1:]], None

    def _cut(self, sequence: CacheSequence) -> None:
        length, cells = 0 if sequence.is_closed else sequence.length, sequence.cells
        if len(cells) > length or self.is_broken:
            self._hold(sequence.number, length, cells[length:])
            self.remove(sequence.number, length)
            del cells[length:]

    def _hold(self, number: int, position: int, cells: Sequence[int]) -> None:
        """Keep cells before the tail in HELD, from this position on."""
        held = bisect_left(cells, self.tail) if self._keeps_order else 0
        if held:
            self.copy(number, HELD, position, position + held)
            self._held_end = max(self._held_end, cells[held - 1] + 1)


def _decode(library: Any, handle: int, batch: Any, is_scored: bool) -> tuple[int, int | None]:
    """Make a pass and, if it is scored, wait for the address of its logits."""
    status: int = library.llama_decode(handle, batch)
    return status, library.llama_get_logits(handle) if is_scored and not status else None


def keeps_order(choices: ContextChoices) -> bool:
    """Return whether a conversation's tokens must be in cells in order."""
    return choices.invariant_rows and not choices.kept_states


def _view(address: int | None, rows: int, columns: int) -> np.ndarray:
    """Return [rows, columns] float32 in the library's memory. Raises SessionError."""
    if address is None:
        raise SessionError(f"{NAME} returned no scores", remedy="Update the library.")
    buffer = (ctypes.c_float * (rows * columns)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(rows, columns)
