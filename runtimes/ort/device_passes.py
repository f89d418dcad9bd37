"""Passes over a cache that stays on its device: what crosses over to it are a pass's rows, and
what comes back are their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_room
from edge_spec.core.tree import TokenTree
from edge_spec.errors import EdgeSpecError
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS
from edge_spec.runtimes.ort.device_cache import DeviceCache
from edge_spec.runtimes.ort.device_memory import DeviceMemory, Traffic
from edge_spec.runtimes.ort.signature import Signature, pass_error, widened
from edge_spec.runtimes.ort.stacked import STACKED

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

    @property
    def traffic(self) -> Traffic:
        return self._memory.traffic

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
            self._memory.bind_input(binding, name, values[name])

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
                self._memory.bind_scores(binding, name, scores)
            if not self._memory.place.is_copied:
                self._bound[graph, rows] = binding
        self._run(graph, binding, tokens, positions, start, sees)
        self._memory.count_scores(*found)
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
