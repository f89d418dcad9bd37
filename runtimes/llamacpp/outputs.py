"""Reads what the passes of a context have scored, and switches what they give and how."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.errors import SessionError
from edge_spec.runtimes.llamacpp.library import Library
from edge_spec.runtimes.llamacpp.weights import GgufWeights


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
