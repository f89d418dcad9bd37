"""The session of a graph whose keys and values grow with every pass: chains only.

Such a graph, as `exporters/optimum` writes them, takes the past of each layer and returns it with
the rows of the pass after it. It copies the whole past to do so; that copy cannot be avoided, but
nothing else is copied where all rows of a pass are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.ort.growing_graph import CacheArray, GrowingGraph
from edge_spec.runtimes.ort.passes import pass_error

MAX_ROWS = 64
PREFILL_ROWS = 256
GROWTH_TOKENS = 512
_PREFILL_SCORES = 1 << 24  # most elements: every row is scored, used or not


class _Side:
    """Buffers for the keys and values of all layers; each array is packed from its start."""

    def __init__(self, arrays: Sequence[CacheArray]) -> None:
        self._arrays = arrays
        self._buffers = [np.empty(0, np.float32) for _ in arrays]

    def grow(self, capacity: int, used: int) -> None:
        """Makes room for `capacity` tokens, keeping the first `used`."""
        for at, (array, old) in enumerate(zip(self._arrays, self._buffers, strict=True)):
            new = np.empty(array.width * capacity, np.float32)
            kept = array.width * used
            new[:kept] = old[:kept]
            self._buffers[at] = new

    def views(self, length: int) -> list[np.ndarray]:
        """Each [1, heads, length, size] float32."""
        return [
            buffer[: array.width * length].reshape(1, array.heads, length, array.size)
            for array, buffer in zip(self._arrays, self._buffers, strict=True)
        ]


class GrowingSession:
    """Two sides of buffers: a pass reads the past from one and writes past and rows to the other.

    A commit of all rows swaps them; one of fewer rows, and a rollback, copy what is kept once.
    """

    def __init__(
        self, inference: onnxruntime.InferenceSession, graph: GrowingGraph, config: ModelConfig
    ) -> None:
        self.length = 0
        self._inference = inference
        self._graph = graph
        self._config = config
        self._binding = inference.io_binding()
        self._run_options = onnxruntime.RunOptions()
        self._past, self._present = _Side(graph.arrays), _Side(graph.arrays)
        self._capacity = 0
        self._scored = 0  # rows of the last pass that can still be committed
        self._attended = np.empty((1, 0), np.int64)
        self._logits: dict[int, np.ndarray] = {}  # by the number of rows

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._config.context_length)
        rows = max(1, min(PREFILL_ROWS, _PREFILL_SCORES // self._config.vocab_size))
        for start in range(0, len(tokens), rows):
            chunk = np.array(tokens[start : start + rows], np.int64)
            self._run(chunk, self._empty_logits(len(chunk)))
            self.commit(range(len(chunk)))

    def forward(self, tree: TokenTree) -> Forward:
        """Raises ContextFullError, ValueError for branches or more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS or not tree.is_chain:
            raise ValueError(f"{rows} rows in one pass; a chain of at most {MAX_ROWS} is expected")
        require_room(self.length, rows, self._config.context_length)
        logits = self._logits.get(rows)
        if logits is None:
            logits = self._logits[rows] = self._empty_logits(rows)
        self._run(tree.tokens.astype(np.int64), logits)
        return Forward(logits[0])

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError unless these are the first rows of a pass that nothing followed."""
        kept = len(rows)
        if not 0 < kept <= self._scored or list(rows) != list(range(kept)):
            raise ValueError(f"rows {list(rows)} are not the first of {self._scored} in a chain")
        if kept == self._scored:
            self._past, self._present = self._present, self._past
        else:
            held, self.length = self.length, 0  # an interrupt leaves no past, not a torn one
            _copy(self._present, held + self._scored, self._past, held + kept)
            self.length = held
        self.length += kept
        self._scored = 0

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._scored = 0
        if length < self.length:
            _copy(self._past, self.length, self._present, length)
            self._past, self._present = self._present, self._past
            self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """Each array by the name of its input, [1, heads, length, size] float32."""
        views = self._past.views(self.length)
        names = [array.past for array in self._graph.arrays]
        return {name: view.copy() for name, view in zip(names, views, strict=True)}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        arrays = self._graph.arrays
        expected = {
            array.past: ((1, array.heads, length, array.size), np.float32) for array in arrays
        }
        require_state(state, expected, length, self._config.context_length)
        self._scored = self.length = 0
        self._reserve(length)
        for array, view in zip(arrays, self._past.views(length), strict=True):
            view[...] = state[array.past]
        self.length = length

    def interrupt(self) -> None:
        """A pass ends before its next operation: what an operation does cannot be interrupted."""
        self._run_options.terminate = True

    def close(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        for side in (self._past, self._present):
            side.grow(0, 0)
        self._logits.clear()
        self._capacity = self._scored = 0

    def _empty_logits(self, rows: int) -> np.ndarray:
        return np.empty((1, rows, self._config.vocab_size), np.float32)

    def _run(self, tokens: np.ndarray, logits: np.ndarray) -> None:
        """tokens: [rows] int64; logits: [1, rows, vocab], written."""
        rows = len(tokens)
        total = self.length + rows
        self._reserve(total)
        self._scored = 0
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": self._attended[:, :total],
            "position_ids": np.arange(self.length, total, dtype=np.int64)[None],
        }
        for name in self._graph.inputs:
            self._binding.bind_cpu_input(name, inputs[name])
        self._bind_output("logits", logits)
        sides = zip(self._past.views(self.length), self._present.views(total), strict=True)
        for array, (past, present) in zip(self._graph.arrays, sides, strict=True):
            self._binding.bind_cpu_input(array.past, past)
            self._bind_output(array.present, present)
        try:
            self._inference.run_with_iobinding(self._binding, self._run_options)
        except Exception as error:
            raise pass_error(error, rows, self.length) from error
        self._scored = rows

    def _bind_output(self, name: str, buffer: np.ndarray) -> None:
        self._binding.bind_output(name, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)

    def _reserve(self, total: int) -> None:
        if total <= self._capacity:
            return
        steps = -(-total // GROWTH_TOKENS)
        capacity = min(steps * GROWTH_TOKENS, self._config.context_length)
        self._past.grow(capacity, self.length)
        self._present.grow(capacity, 0)
        self._capacity = capacity  # last: memory may be short for one of them
        self._attended = np.ones((1, self._capacity), np.int64)


def _copy(source: _Side, source_length: int, target: _Side, length: int) -> None:
    """The first `length` tokens of what `source` holds."""
    views = zip(source.views(source_length), target.views(length), strict=True)
    for written, kept in views:
        kept[...] = written[:, :, :length]
