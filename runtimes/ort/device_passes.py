"""Passes over a cache that stays on its device: what crosses over to it are a pass's rows, and
what comes back are their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.errors import EdgeSpecError
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS
from edge_spec.runtimes.ort.device_memory import (
    DeviceGraphs,
    DeviceMemory,
    capacity_for,
    shares_weights,
)
from edge_spec.runtimes.ort.graph_loader import GraphLoader
from edge_spec.runtimes.ort.signature import (
    STACKED,
    Signature,
    bind_output,
    pass_error,
    widened,
)

_NOTHING = (0, 0, 0, 0)


class DeviceCache:
    """Keys and values of all layers, [1, layers * 2 * kv_heads, capacity, head_dim]."""

    def __init__(self, config: ModelConfig, element: np.dtype[Any], memory: DeviceMemory) -> None:
        self._config = config
        self._element = element
        self._memory = memory
        self.capacity = 0
        self.generation = 0  # changes when the block moves: what is bound to it is stale
        self._block: OrtValue | None = None

    def reserve(self, needed: int) -> None:
        """Makes room for `needed` tokens; the block may move, and is then copied on the device."""
        if needed <= self.capacity:
            return
        room = capacity_for(needed, self.capacity, self._config.context_length)
        held = self._zeros(1) if self._block is None else self._block
        self._hold(held, room)

    def clear(self) -> None:
        self._block, self.capacity = None, 0
        self.generation += 1

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Binds the keys and the values of each layer as both past and present."""
        assert self._block is not None
        config, address = self._config, self._memory.address
        shape = (1, config.num_kv_heads, self.capacity, config.head_dim)
        step = prod(shape) * self._element.itemsize
        pointer = self._block.data_ptr()
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                buffer = (*address, self._element.type, shape, pointer)
                binding.bind_input(f"past.{layer}.{part}", *buffer)
                binding.bind_output(f"present.{layer}.{part}", *buffer)
                pointer += step

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Moves the tokens at start + rows to start, start + 1, ...; rows ascend."""
        kept = np.asarray(rows)
        moved = np.flatnonzero(kept != np.arange(len(kept)))
        if len(moved):
            assert self._block is not None
            first = int(moved[0])
            self._memory.move(self._block, start + kept[first:], start + first)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] of the cache's type, as cache.py has it;
        read once."""
        block = self._zeros(0) if self._block is None else self._memory.taken(self._block, length)
        return {"kv": block.reshape(self._shape(length))}

    def require(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError for what is no state of `length` tokens."""
        expected = {"kv": (self._shape(length), self._element)}
        require_state(state, expected, length, self._config.context_length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Writes a state once that `require` has accepted."""
        room = capacity_for(length, self.capacity, self._config.context_length)
        held = state["kv"].reshape(self._zeros(length).shape) if length else self._zeros(1)
        self._hold(np.ascontiguousarray(held), room)

    def _hold(self, tokens: np.ndarray | OrtValue, room: int) -> None:
        """Takes a new block of these tokens and room after them."""
        count = tokens.shape[2] if isinstance(tokens, np.ndarray) else self.capacity
        # First: where memory is short, the old one stays.
        grown = self._memory.padded(tokens, _NOTHING, (0, 0, room - count, 0))
        self._block, self.capacity = grown, room
        self.generation += 1

    def _zeros(self, length: int) -> np.ndarray:
        config = self._config
        parts = config.num_layers * 2 * config.num_kv_heads
        return np.zeros((1, parts, length, config.head_dim), self._element)

    def _shape(self, length: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, 1, config.num_kv_heads, length, config.head_dim)


_BIAS = "attention_bias"


class DeviceGraph:
    """One form of the model, and what it takes and gives."""

    def __init__(self, inference: onnxruntime.InferenceSession) -> None:
        self.inference = inference
        self.inputs = frozenset(value.name for value in inference.get_inputs())
        self.signature = Signature.of(inference)


class DevicePasses:
    """A width is bound once; what changes from one pass to the next is bound again, since it is
    copied when it is bound.

    trees, chains: the model in a form for each, or twice the same. A single row is attended once:
    that its kernel is another one concerns the CPU (passes.MIN_ATTENDED). There are no CUDA graphs:
    one replays the total length that GroupQueryAttention reads from main memory while it is made,
    and that grows with every pass.
    """

    def __init__(
        self, trees: DeviceGraph, chains: DeviceGraph, config: ModelConfig, memory: DeviceMemory
    ) -> None:
        signature = trees.signature
        self._trees, self._chains = trees, chains
        self._config = config
        self._memory = memory
        self.cache = DeviceCache(config, signature.cache, memory)
        self._run_options = onnxruntime.RunOptions()
        # One for all widths, since scores are valid until the next pass.
        self._logits = np.empty((MAX_ROWS, config.vocab_size), signature.logits)
        self._hidden = np.empty((MAX_ROWS, config.hidden_size), signature.hidden)
        self._bound: dict[tuple[DeviceGraph, int], onnxruntime.IOBinding] = {}
        self._generation = self.cache.generation  # of the cache that is bound

    def prefill(self, tokens: Sequence[int], start: int) -> Iterator[int]:
        """Yields the number of cached tokens after each pass, whose scores stay on the device.
        Raises ContextFullError, SessionError, DeviceMemoryError; so does `score`."""
        with translated(len(tokens), start):
            self._reserve(len(tokens), start)
        for done in range(0, len(tokens), PREFILL_ROWS):
            chunk = np.array(tokens[done : done + PREFILL_ROWS])
            at, rows = start + done, len(chunk)
            with translated(rows, at):
                binding = self._bind(self._chains, rows, np.array([rows - 1]))
                for name in ("logits", "hidden"):
                    self._memory.bind_unread(binding, name)
                self._run(self._chains, binding, chunk, at + np.arange(rows), at, None)
            yield at + rows

    def score(self, tree: TokenTree, start: int) -> Forward:
        """Raises ValueError for more than MAX_ROWS, and for branches where chains alone run."""
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        if not tree.is_chain and _BIAS not in self._trees.inputs:
            raise ValueError("a graph without a bias takes chains alone")
        with translated(rows, start):
            self._reserve(rows, start)
            sees = None if tree.is_chain else tree.ancestors
            if start or sees is None:
                return widened(*self._score(tree.tokens, start + tree.depths, start, sees))
            # On an empty cache GroupQueryAttention counts rows by itself (passes.Passes.score).
            root = [each.copy() for each in self._score(tree.tokens[:1], tree.depths[:1], 0, None)]
            rest = self._score(tree.tokens[1:], tree.depths[1:], 1, sees[1:, 1:])
            return widened(*(np.concatenate(pair) for pair in zip(root, rest, strict=True)))

    def interrupt(self) -> None:
        """A pass ends before its next operation: what an operation does cannot be interrupted."""
        self._run_options.terminate = True

    def close(self) -> None:
        self._bound.clear()
        self.cache.clear()
        self._logits, self._hidden = self._logits[:0].copy(), self._hidden[:0].copy()

    def _reserve(self, rows: int, start: int) -> None:
        require_room(start, rows, self._config.context_length)
        self.cache.reserve(start + rows)
        if self._generation != self.cache.generation:
            self._bound.clear()
            self._generation = self.cache.generation

    def _bind(self, graph: DeviceGraph, rows: int, scored: np.ndarray) -> onnxruntime.IOBinding:
        """Binds what is the same in all passes of this width, but for what they score."""
        binding = graph.inference.io_binding()
        self.cache.bind(binding)
        every = np.arange(rows)
        constant = {
            "attention_rows": every,
            "kept_rows": every,
            "logit_rows": scored.astype(np.int64),
            STACKED: np.zeros(1, np.bool_),
        }
        self._bind_inputs(graph, binding, constant)
        return binding

    def _bind_inputs(
        self,
        graph: DeviceGraph,
        binding: onnxruntime.IOBinding,
        values: Mapping[str, np.ndarray],
    ) -> None:
        """Binds those that the graph has."""
        for name in values.keys() & graph.inputs:
            binding.bind_cpu_input(name, values[name])

    def _score(
        self, tokens: np.ndarray, positions: np.ndarray, start: int, sees: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pass; sees: [rows, rows] bool, None for a chain."""
        rows = len(tokens)
        graph = self._chains if sees is None else self._trees
        found = self._logits[:rows], self._hidden[:rows]
        binding = self._bound.get((graph, rows))
        if binding is None:
            binding = self._bind(graph, rows, np.arange(rows))
            for name, scores in zip(("logits", "hidden"), found, strict=True):
                bind_output(binding, name, scores)
            if not self._memory.place.is_copied:
                self._bound[graph, rows] = binding
        self._run(graph, binding, tokens, positions, start, sees)
        return found

    def _run(
        self,
        graph: DeviceGraph,
        binding: onnxruntime.IOBinding,
        tokens: np.ndarray,
        positions: np.ndarray,
        start: int,
        sees: np.ndarray | None,
    ) -> None:
        total = start + len(tokens)
        changing: dict[str, np.ndarray] = {
            "input_ids": tokens.astype(np.int64)[None],
            "position_ids": positions.astype(np.int64)[None],
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "cached_tokens": np.array([start]),
        }
        self._bind_inputs(graph, binding, changing)
        if _BIAS in graph.inputs:
            binding.bind_ortvalue_input(_BIAS, self._bias(len(tokens), start, sees))
        graph.inference.run_with_iobinding(binding, self._run_options)

    def _bias(self, rows: int, start: int, sees: np.ndarray | None) -> onnxruntime.OrtValue:
        """[1, 1, rows, start + rows], made on the device: all rows see what is cached. The operator
        is causal by itself, so a chain needs no bias but zeros."""
        own = np.zeros((1, 1, rows, rows), self._trees.signature.bias)
        if sees is not None:
            own[0, 0] = np.where(sees, 0.0, -np.inf)
        return self._memory.padded(own, (0, 0, 0, start), (0, 0, 0, 0))


@contextmanager
def translated(rows: int, start: int) -> Iterator[None]:
    """Turns what onnxruntime raises into a `pass_error`."""
    try:
        yield
    except (EdgeSpecError, MemoryError):
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise pass_error(error, rows, start) from error


class DeviceSession:
    """Commits and rollbacks of chains change its length alone; the rows of a tree's path are moved
    together on the device.

    It has no parts: their graph would be there with weights of its own.
    """

    def __init__(self, passes: DevicePasses) -> None:
        self.length = 0
        self._passes = passes
        self._scored = 0  # rows of the last pass that can still be committed

    def prefill(self, tokens: Sequence[int]) -> None:
        self._scored = 0
        for length in self._passes.prefill(tokens, self.length):
            self.length = length

    def forward(self, tree: TokenTree) -> Forward:
        self._scored = 0
        out = self._passes.score(tree, self.length)
        self._scored = len(tree)
        return out

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError for rows that the last pass did not score, or that are gone."""
        if not rows or rows[-1] >= self._scored:
            raise ValueError(f"rows {list(rows)} of a pass over {self._scored} cannot be kept")
        self._scored = 0
        with translated(len(rows), self.length):
            self._passes.cache.compact(self.length, rows)
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._scored = 0
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        with translated(0, self.length):
            return self._passes.cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._passes.cache.require(state, length)
        self._scored = 0
        with translated(0, length):
            self._passes.cache.restore(state, length)
        self.length = length

    def interrupt(self) -> None:
        self._passes.interrupt()

    def close(self) -> None:
        self._passes.close()


class DeviceSessions:
    """inference: of the model in the form of `loader`. Where that takes trees, and large weights
    can be shared (graph_forms.py), the form for chains alone is loaded beside it. Raises
    BundleError, DeviceError."""

    def __init__(self, loader: GraphLoader, inference: onnxruntime.InferenceSession) -> None:
        assert loader.place is not None
        self._place = loader.place
        self._config = loader.config
        self._trees = self._chains = DeviceGraph(inference)
        form = loader.form
        if form is not None and form.takes_trees and shares_weights(self._place, self._config):
            chains = replace(form, takes_trees=False)
            self._chains = DeviceGraph(loader.open_form(chains))
        self._copying = DeviceGraphs(loader.open_beside, self._trees.signature.cache)

    def open(self) -> DeviceSession:
        memory = DeviceMemory(self._place, self._copying)
        return DeviceSession(DevicePasses(self._trees, self._chains, self._config, memory))
