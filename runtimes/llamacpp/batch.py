"""The tokens of one pass in the layout of `llama_batch`, in buffers that are written in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.core.model import Forward
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
        self._mixed = self._struct(
            batch_type, self._num_sequences, self._to_sequences, self._wanted
        )

    def chain(
        self,
        tokens: Sequence[int] | np.ndarray,
        position: int,
        sequence: int = 0,
        is_scored: bool = True,
    ) -> Any:
        """A chain of one sequence from `position` on, of which all is scored, or nothing."""
        self._sequence[0] = sequence
        struct = self._chain if is_scored else self._prefill
        count = len(tokens)
        if count == 1:  # every plain round: a third of the time
            self._tokens[0], self._positions[0] = tokens[0], position
        else:
            self._tokens[:count] = tokens
            np.add(self._offsets[:count], position, out=self._positions[:count])
        struct.n_tokens = count
        return struct

    def mixed(self, rows: Sequence[tuple[int, int, Sequence[int], bool]]) -> Any:
        """rows: of each its token, position and sequences, and whether it is scored."""
        for at, (token, position, sequences, is_scored) in enumerate(rows):
            self._tokens[at], self._positions[at] = token, position
            self._num_sequences[at] = len(sequences)
            self._sequences[at, : len(sequences)] = sequences
            self._wanted[at] = is_scored
        self._mixed.n_tokens = len(rows)
        return self._mixed

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
        self._forwards: dict[tuple[int | None, int, bool | None], Forward] = {}

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
        key = start, rows, self._gives_hidden
        if key not in self._forwards:
            logits = view(library, start, rows, self._weights.vocab_size)
            hidden = self.hidden(rows) if self._gives_hidden else None
            self._forwards[key] = Forward(logits, hidden)
        return self._forwards[key]

    def hidden(self, rows: int) -> np.ndarray:
        """Returns the hidden states of the last pass."""
        library = self._weights.library
        return view(library, library.hidden(self._handle), rows, self._weights.hidden_size)


def view(library: Library, address: int | None, rows: int, columns: int) -> np.ndarray:
    """Returns [rows, columns] float32 in the library's own memory. Raises SessionError."""
    if address is None:
        raise SessionError(f"{library.name} returned no scores", remedy="Update the library.")
    buffer = (ctypes.c_float * (rows * columns)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(rows, columns)
