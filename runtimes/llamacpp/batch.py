"""The tokens of one pass in the layout of `llama_batch`, in buffers that are written in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.llamacpp.library import Library
from edge_spec.runtimes.llamacpp.weights import GgufWeights


class Batch:
    """Each method returns what `llama_decode` takes; it points into arrays that live as long as
    this, and is valid until the next call."""

    def __init__(self, batch_type: type[ctypes.Structure], num_tokens: int, max_rows: int) -> None:
        self._tokens = np.zeros(num_tokens, np.int32)
        self._positions = np.zeros(num_tokens, np.int32)
        self._offsets = np.arange(num_tokens, dtype=np.int32)
        # A token's sequences are read through a pointer: for a chain all lead to the same number.
        self._ones = np.ones(num_tokens, np.int32)
        self._sequence = np.zeros(1, np.int32)
        self._to_sequence = np.full(num_tokens, self._sequence.ctypes.data, np.uintp)
        self._num_sequences = np.ones(max_rows, np.int32)
        self._sequences = np.zeros((max_rows, max_rows), np.int32)
        rows = np.arange(max_rows, dtype=np.uintp) * np.uintp(self._sequences.strides[0])
        self._to_sequences = np.uintp(self._sequences.ctypes.data) + rows
        self._scored = np.ones(num_tokens, np.int8)
        self._unscored = np.zeros(num_tokens, np.int8)
        self._wanted = np.ones(num_tokens, np.int8)
        self._prefill = self._struct(batch_type, self._ones, self._to_sequence, self._unscored)
        self._chain = self._struct(batch_type, self._ones, self._to_sequence, self._scored)
        branched = self._num_sequences, self._to_sequences
        self._tree = self._struct(batch_type, *branched, self._scored)
        self._mixed = self._struct(batch_type, *branched, self._wanted)

    def prefill(self, tokens: Sequence[int], position: int, sequence: int = 0) -> Any:
        """A chain from `position` on, of which nothing is scored."""
        self._sequence[0] = sequence  # no chain that is scored is in another one than 0
        return self._set_chain(self._prefill, tokens, position)

    def chain(self, tokens: Sequence[int] | np.ndarray, position: int) -> Any:
        """A chain in sequence 0 from `position` on, of which all is scored."""
        if len(tokens) == 1:  # every plain round: a third of the time
            self._tokens[0], self._positions[0], self._chain.n_tokens = tokens[0], position, 1
            return self._chain
        return self._set_chain(self._chain, tokens, position)

    def tree(self, tree: TokenTree, position: int) -> tuple[Any, np.ndarray]:
        """Each leaf is a sequence, and a row belongs to those of the leaves below it.

        Also returns the first sequence of each row, [rows]; sequence 0 is that of the first leaf.
        """
        rows = len(tree)
        row_of, sequence = np.nonzero(tree.ancestors[tree.leaves].T)
        counts = np.bincount(row_of, minlength=rows)
        starts = np.cumsum(counts) - counts
        self._sequences[row_of, np.arange(len(row_of)) - starts[row_of]] = sequence
        self._num_sequences[:rows] = counts
        self._tokens[:rows] = tree.tokens
        np.add(tree.depths, position, out=self._positions[:rows])
        self._tree.n_tokens = rows
        return self._tree, self._sequences[:rows, 0].copy()

    def mixed(
        self, rows: Sequence[tuple[int, int, Sequence[int]]], is_scored: Sequence[bool]
    ) -> Any:
        """rows: token, position and sequences of each."""
        self._wanted[: len(rows)] = is_scored
        for at, (token, position, sequences) in enumerate(rows):
            self._tokens[at], self._positions[at] = token, position
            self._num_sequences[at] = len(sequences)
            self._sequences[at, : len(sequences)] = sequences
        self._mixed.n_tokens = len(rows)
        return self._mixed

    def _set_chain(self, struct: Any, tokens: Sequence[int] | np.ndarray, position: int) -> Any:
        count = len(tokens)
        self._tokens[:count] = tokens
        np.add(self._offsets[:count], position, out=self._positions[:count])
        struct.n_tokens = count
        return struct

    def _struct(
        self,
        batch_type: type[ctypes.Structure],
        num_sequences: np.ndarray,
        sequences: np.ndarray,
        scored: np.ndarray,
    ) -> Any:
        struct: Any = batch_type()
        kinds = dict(struct._fields_)
        for field, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", num_sequences),
            ("seq_id", sequences),
            ("logits", scored),
        ):
            setattr(struct, field, ctypes.cast(array.ctypes.data, kinds[field]))
        return struct


class ContextOutputs:
    """Belongs to one context, which another one takes the place of.

    is_steady: whether passes score a single row as those of wider passes are.
    """

    def __init__(self, weights: GgufWeights, handle: int, is_steady: bool) -> None:
        self._weights = weights
        self._handle = handle
        self._switch_steady = weights.library.steady_rows(handle) if is_steady else None
        self._is_single = False
        self._gives_hidden: bool | None = False
        # By the address of the logits, whose buffer the library keeps; hidden states share it.
        self._forwards: dict[tuple[int | None, int], Forward] = {}

    def want_steady(self, is_single: bool) -> None:
        """Prepares a pass of one row, or of several."""
        if self._switch_steady is not None and is_single != self._is_single:
            self._switch_steady(is_single)
            self._is_single = is_single

    def want_hidden(self, wanted: bool) -> None:
        """Has the next passes give hidden states, where the model can."""
        if self._weights.gives_final_states and wanted != self._gives_hidden:
            self._gives_hidden = None
            self._weights.library.want_hidden(self._handle, wanted)
            self._gives_hidden = wanted

    def scores(self, rows: int) -> Forward:
        """Returns those of the last pass, in the library's own buffers."""
        library = self._weights.library
        start = library.logits(self._handle)
        if (start, rows) not in self._forwards:
            logits = view(library, start, rows, self._weights.vocab_size)
            hidden = self.hidden(rows) if self._gives_hidden else None
            self._forwards[start, rows] = Forward(logits, hidden)
        return self._forwards[start, rows]

    def hidden(self, rows: int) -> np.ndarray:
        """Returns the hidden states of the last pass."""
        library = self._weights.library
        return view(library, library.hidden(self._handle), rows, self._weights.hidden_size)


def scores_of(
    weights: GgufWeights, context: int, parts: Sequence[list[int]], has_hidden: bool
) -> list[Forward]:
    """Returns copies of the last pass's. parts: where those of each are among what is scored."""
    library, count = weights.library, 1 + max(row for rows in parts for row in rows)
    logits = view(library, library.logits(context), count, weights.vocab_size)
    if not has_hidden:
        return [Forward(logits[rows]) for rows in parts]
    hidden = view(library, library.hidden(context), count, weights.hidden_size)
    return [Forward(logits[rows], hidden[rows]) for rows in parts]


def view(library: Library, address: int | None, rows: int, columns: int) -> np.ndarray:
    """Returns [rows, columns] float32 in the library's own memory. Raises SessionError."""
    if address is None:
        raise SessionError(f"{library.name} returned no scores", remedy="Update the library.")
    buffer = (ctypes.c_float * (rows * columns)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(rows, columns)
