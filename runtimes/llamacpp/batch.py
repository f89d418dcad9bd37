"""The tokens of one pass in the layout of `llama_batch`, in buffers that are written in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.tree import TokenTree


class Batch:
    """`struct` is what `llama_decode` takes; it points into arrays that live as long as this."""

    def __init__(self, batch_type: type[ctypes.Structure], num_tokens: int, max_rows: int) -> None:
        self._tokens = np.zeros(num_tokens, np.int32)
        self._positions = np.zeros(num_tokens, np.int32)
        self._scored = np.zeros(num_tokens, np.int8)
        self._num_sequences = np.ones(num_tokens, np.int32)
        self._sequences = np.zeros((max_rows, max_rows), np.int32)
        # A token's sequences are read through a pointer: for a chain all lead to the same zero.
        zero = np.zeros(1, np.int32)
        self._of_chain = (np.full(num_tokens, zero.ctypes.data, np.uintp), zero)
        rows = np.arange(max_rows, dtype=np.uintp) * np.uintp(self._sequences.strides[0])
        self._of_tree = np.uintp(self._sequences.ctypes.data) + rows
        self.struct: Any = batch_type()
        self._point("token", self._tokens)
        self._point("pos", self._positions)
        self._point("logits", self._scored)
        self._point("n_seq_id", self._num_sequences)
        self._point("seq_id", self._of_chain[0])

    def set_chain(self, tokens: Sequence[int] | np.ndarray, position: int, scored: bool) -> None:
        """All in sequence 0, from `position` on."""
        count = len(tokens)
        self.struct.n_tokens = count
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(position, position + count)
        self._scored[:count] = scored
        self._num_sequences[:count] = 1
        self._point("seq_id", self._of_chain[0])

    def set_tree(self, tree: TokenTree, position: int) -> np.ndarray:
        """Each leaf is a sequence, and a row belongs to those of the leaves below it.

        Returns the first sequence of each row, [rows]; sequence 0 is that of the first leaf.
        """
        rows = len(tree)
        leaves = np.setdiff1d(np.arange(rows), tree.parents)
        row_of, sequence = np.nonzero(tree.ancestors[leaves].T)
        counts = np.bincount(row_of, minlength=rows)
        starts = np.cumsum(counts) - counts
        self._sequences[row_of, np.arange(len(row_of)) - starts[row_of]] = sequence
        self.struct.n_tokens = rows
        self._tokens[:rows] = tree.tokens
        self._positions[:rows] = tree.depths + position
        self._scored[:rows] = True
        self._num_sequences[:rows] = counts
        self._point("seq_id", self._of_tree)
        return self._sequences[:rows, 0].copy()

    def _point(self, field: str, array: np.ndarray) -> None:
        kind = dict(self.struct._fields_)[field]
        setattr(self.struct, field, ctypes.cast(array.ctypes.data, kind))
