"""Passes of one graph over a KV cache, in main memory or a device's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_room
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS, KvCache
from edge_spec.runtimes.ort.device_memory import DeviceCache
from edge_spec.runtimes.ort.graph_forms import feature_name
from edge_spec.runtimes.ort.signature import (
    BIAS,
    STACKED,
    Bias,
    Graph,
    StackedMask,
    attention_inputs,
    bind_output,
    translated,
    widened,
)

MIN_ATTENDED = 2  # rows that attention computes: see exporters/onnx/graph.py


class HostCache(KvCache):
    """One whose buffers onnxruntime reads and writes where they are."""

    is_copied = False

    def bind(self, binding: onnxruntime.IOBinding, suffix: str = "") -> None:
        """Binds each buffer as both past and present. suffix: of the names."""
        for name, buffer in self.buffers():
            shared = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(f"past.{name}{suffix}", shared)
            binding.bind_ortvalue_output(f"present.{name}{suffix}", shared)


Cache = HostCache | DeviceCache


@dataclass(frozen=True, eq=False)
class _Bound:
    """What is the same in all passes of one width: they write their scores to the same buffers."""

    binding: onnxruntime.IOBinding
    attended: int  # rows
    mask: StackedMask | None  # of a stacked pass
    logits: np.ndarray  # [scored, vocab]
    hidden: np.ndarray  # [scored, hidden]
    features: np.ndarray | None  # [rows, features, hidden]
    written: dict[str, np.ndarray] = field(default_factory=dict)  # inputs whose memory is shared

    @property
    def scores(self) -> Forward:
        return widened(self.logits, self.hidden, self.features)


class Passes:
    """A pass costs one `run_with_iobinding`. On the CPU, numpy and onnxruntime share every buffer;
    to a device the rows of a pass cross over, and their scores come back.

    `start` is the number of cached tokens that a pass continues: what stands after them is
    overwritten. `runs` [2 * layers] bool, of a graph of exporters/onnx/graph.py: the sublayers
    that the next pass runs; None for a graph without a choice. chains: the graph in the form for
    chains alone, where there is one (graph_forms.py). There are no CUDA graphs: one replays the
    total length that GroupQueryAttention reads from main memory while it is made, and that grows
    with every pass.
    """

    def __init__(
        self,
        graph: Graph,
        config: ModelConfig,
        cache: Cache,
        runs: np.ndarray | None = None,
        chains: Graph | None = None,
    ) -> None:
        self.runs = runs
        self.cache = cache
        self._graph, self._chains = graph, chains or graph
        self._config = config
        self._run_options = onnxruntime.RunOptions()
        self._bias = None if graph.bias is None else Bias(graph.bias)
        # One for all widths, since scores are valid until the next pass. Rows that are never used
        # take no memory.
        self._logits = np.empty((MAX_ROWS, config.vocab_size), graph.logits)
        self._hidden = np.empty((MAX_ROWS, config.hidden_size), graph.hidden)
        self._bound: dict[tuple[onnxruntime.InferenceSession, int], _Bound] = {}
        self._generation = cache.generation  # of the cache that is bound
        self._source: Mapping[str, np.ndarray] = {}  # further inputs, the same in all passes
        self._layers: tuple[int, ...] = ()  # whose features passes give

    def attend_to(self, source: Mapping[str, np.ndarray]) -> None:
        """source: the keys and values of one, by their inputs' names, for all passes from now."""
        self._source = source
        self._bound.clear()

    def collect(self, inference: onnxruntime.InferenceSession, layers: Sequence[int]) -> None:
        """The next passes give these features, by a graph that has them."""
        self._layers = tuple(layers)
        self._bound.clear()
        self.use(inference)

    def use(self, inference: onnxruntime.InferenceSession) -> None:
        """Runs the next passes with another session of the same graph."""
        self._graph = self._chains = replace(self._graph, inference=inference)

    def prefill(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, np.ndarray | None]]:
        """Yields the number of cached tokens after each pass, and its features, if any,
        [rows, features, hidden] float32. Raises ContextFullError, SessionError,
        DeviceMemoryError; so does `score`."""
        for at, chunk in self._chunks(tokens, start):
            with translated(len(chunk), at):
                bound = self._bind_reading(len(chunk))
                self._run(self._chains, bound, chunk, at + np.arange(len(chunk)), at)
            yield at + len(chunk), bound.features

    def score(self, tree: TokenTree, start: int) -> Forward:
        """Raises ValueError for more than MAX_ROWS, and for branches where chains alone run."""
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        if not tree.is_chain and self._bias is None:
            raise ValueError("a graph without a bias takes chains alone")
        self._reserve(rows, start)
        sees = None if tree.is_chain else tree.ancestors
        if start or sees is None:
            return self._score(tree.tokens, start + tree.depths, start, sees).scores
        # On an empty cache GroupQueryAttention ignores position_ids and counts rows itself, so
        # that siblings would follow each other: the root has to go before the others.
        root = self._score(tree.tokens[:1], tree.depths[:1], 0, None)
        first = [None if each is None else each.copy() for each in _parts(root)]
        rest = _parts(self._score(tree.tokens[1:], tree.depths[1:], 1, sees[1:, 1:]))
        logits, hidden, features = (
            None if one is None or other is None else np.concatenate([one, other])
            for one, other in zip(first, rest, strict=True)
        )
        assert logits is not None and hidden is not None
        return widened(logits, hidden, features)

    def prepare_joint(self, rows: int, start: int) -> None:
        """Makes room for a pass that other sessions share; nothing can be kept until it has
        succeeded. Raises ContextFullError."""
        self._reserve(rows, start)
        self.cache.last_writer = None

    def joined(self) -> None:
        """Lets `keep` take the rows that such a pass has written after the cached tokens."""
        self.cache.last_writer = self

    def keep(self, rows: Sequence[int], start: int) -> None:
        """Moves these rows of the last pass together.

        Raises ValueError where another session has written to the cache since, or the pass failed.
        """
        if self.cache.last_writer is not self:
            raise ValueError("the rows to commit are gone: the cache was written to since")
        if rows[-1] != len(rows) - 1:  # not simply the first rows
            self.cache.compact(start, rows)

    def forget(self) -> None:
        """Lets nobody commit rows of the last pass."""
        if self.cache.last_writer is self:
            self.cache.last_writer = None

    def updates(self, tokens: Sequence[int], start: int) -> Iterator[list[np.ndarray]]:
        """Gives for each pass over a part of `tokens`: the embedded rows, then what each sublayer
        adds to them, [rows, hidden] float32. Raises ContextFullError."""
        names = ["embedded", *(f"update.{k}" for k in range(2 * self._config.num_layers))]
        for at, chunk in self._chunks(tokens, start):
            bound = self._bind_reading(len(chunk))
            found = [np.empty((1, len(chunk), self._config.hidden_size), np.float32) for _ in names]
            for name, buffer in zip(names, found, strict=True):
                bind_output(bound.binding, name, buffer)
            with translated(len(chunk), at):
                self._run(self._chains, bound, chunk, at + np.arange(len(chunk)), at)
            self.cache.last_writer = None  # none of these rows can be committed
            yield [buffer[0] for buffer in found]

    def interrupt(self) -> None:
        """A pass ends before its next operation: what an operation does cannot be interrupted."""
        self._run_options.terminate = True

    def close(self) -> None:
        """Gives its memory back now: whoever holds this may be part of a cycle, which Python may
        keep for hours."""
        self._bound.clear()
        self._bias = None
        self._logits, self._hidden = self._logits[:0].copy(), self._hidden[:0].copy()

    def _chunks(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, np.ndarray]]:
        """Makes room for all of them, and yields the tokens of each pass and where it starts."""
        self._reserve(len(tokens), start)
        for done in range(0, len(tokens), PREFILL_ROWS):
            yield start + done, np.asarray(tokens[done : done + PREFILL_ROWS])

    def _reserve(self, rows: int, start: int) -> None:
        require_room(start, rows, self._config.context_length)
        self.cache.reserve(start + max(rows, MIN_ATTENDED), start)
        if self._generation != self.cache.generation:  # this session or another has grown it
            self._bound.clear()
            self._generation = self.cache.generation

    def _bind_reading(self, rows: int) -> _Bound:
        """The head has to score something: the last row, whose scores are not used."""
        return self._bind(self._chains, rows, np.array([rows - 1]))

    def _bind(
        self, graph: Graph, rows: int, scored: np.ndarray, is_stacked: bool = False
    ) -> _Bound:
        binding, config = graph.inference.io_binding(), self._config
        self.cache.bind(binding)
        attended = rows
        if not is_stacked and "attention_rows" in graph.inputs:
            attended = max(rows, MIN_ATTENDED)
        constant: dict[str, np.ndarray] = {
            "attention_rows": np.minimum(np.arange(attended), rows - 1),
            "kept_rows": np.arange(rows),
            "logit_rows": scored.astype(np.int64),
            STACKED: np.array([is_stacked]),
            **self._source,
        }
        if self.runs is not None:
            constant["no_update"] = np.zeros((1, rows, config.hidden_size), np.float32)
            for sublayer in range(len(self.runs)):
                constant[f"runs.{sublayer}"] = self.runs[sublayer : sublayer + 1]
        graph.bind(binding, constant)
        logits, hidden = self._logits[: len(scored)], self._hidden[: len(scored)]
        bind_output(binding, "logits", logits)
        bind_output(binding, "hidden", hidden)
        features = None
        if self._layers:
            streams = np.empty((len(self._layers), 1, rows, config.hidden_size), np.float32)
            for layer, stream in zip(self._layers, streams, strict=True):
                is_normed = layer == config.num_layers
                bind_output(binding, feature_name(layer), stream[0] if is_normed else stream)
            features = streams[:, 0].swapaxes(0, 1)
        mask = StackedMask(rows, self.cache.capacity) if is_stacked else None
        if mask is not None:
            binding.bind_cpu_input(BIAS, mask.bias)
        return _Bound(binding, attended, mask, logits, hidden, features)

    def _score(
        self, tokens: np.ndarray, positions: np.ndarray, start: int, sees: np.ndarray | None
    ) -> _Bound:
        """One pass; sees: [rows, rows] bool, None for a chain."""
        rows = len(tokens)
        graph = self._chains if sees is None else self._graph
        with translated(rows, start):
            bound = self._bound.get((graph.inference, rows))
            if bound is None:
                bound = self._bind(graph, rows, np.arange(rows), graph.has_stacked)
                if not self.cache.is_copied:
                    self._bound[graph.inference, rows] = bound
            self._run(graph, bound, tokens, positions, start, sees)
        return bound

    def _run(
        self,
        graph: Graph,
        bound: _Bound,
        tokens: np.ndarray,
        positions: np.ndarray,
        start: int,
        sees: np.ndarray | None = None,
    ) -> None:
        changing = attention_inputs(self._config, positions, sees, start, bound.attended)
        changing["input_ids"] = tokens.astype(np.int64)[None]
        for name, values in changing.items():
            if name in bound.written:
                bound.written[name][...] = values
            elif name in graph.inputs:
                bound.binding.bind_cpu_input(name, values)
                if isinstance(self.cache, HostCache):
                    bound.written[name] = values
        if bound.mask is not None:
            bound.mask.show(start, sees)
        elif self._bias is not None and graph.bias is not None:
            bias = self._bias.show(bound.attended, start, sees)
            bound.binding.bind_cpu_input(BIAS, bias)
        self.cache.last_writer = None
        graph.inference.run_with_iobinding(bound.binding, self._run_options)
        self.cache.last_writer = self


def _parts(bound: _Bound) -> tuple[np.ndarray | None, ...]:
    return bound.logits, bound.hidden, bound.features
