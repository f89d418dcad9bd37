"""Sessions with a KV cache each, which parts of the model share on the CPU.

Parts serve self-speculation: early exit (Elhoushi et al. 2024, LayerSkip) and layer skipping (Zhang
et al. 2023, Draft & Verify; Xia et al. 2024, SWIFT). A part writes after the target's committed
tokens, and the target overwrites those slots in every layer before it reads them: its scores do not
change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, require_rollback, require_room
from edge_spec.core.source_session import SourceSession
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS
from edge_spec.runtimes.ort.caches import DeviceCache, HostCache
from edge_spec.runtimes.ort.graph_forms import feature_name
from edge_spec.runtimes.ort.model_graphs import ModelGraphs
from edge_spec.runtimes.ort.signature import (
    BIAS,
    STACKED,
    Graph,
    StackedMask,
    attention_inputs,
    attention_mask,
    bind_output,
    translated,
    widened,
)

MIN_ATTENDED = 2  # least rows of attention (exporters/onnx/graph.py)
Cache = TypeVar("Cache", HostCache, DeviceCache)


@dataclass(frozen=True, eq=False)
class _Bound:
    """What passes of one width share, output buffers too."""

    binding: onnxruntime.IOBinding
    attended: int  # rows
    mask: StackedMask | None  # of a stacked pass
    logits: np.ndarray  # [scored, vocab]
    hidden: np.ndarray  # [scored, hidden]
    features: np.ndarray | None  # [rows, features, hidden]
    written: dict[str, np.ndarray] = field(default_factory=dict)  # inputs in shared memory

    @property
    def scores(self) -> Forward:
        return widened(self.logits, self.hidden, self.features)

    @property
    def parts(self) -> tuple[np.ndarray | None, ...]:
        return self.logits, self.hidden, self.features


class _Passes(Generic[Cache]):
    """Commits tokens and scores rows after them, in passes of one graph over a cache.

    A pass is one `run_with_iobinding`; on the CPU, numpy and onnxruntime share all buffers. There
    are no CUDA graphs: one would replay the total length it was made with, which
    GroupQueryAttention reads from main memory and which grows.
    runs [2 * layers] bool: the next pass's sublayers; None: all.
    """

    def __init__(
        self, graph: Graph, config: ModelConfig, cache: Cache, runs: np.ndarray | None = None
    ) -> None:
        self.length = 0
        self.cache: Cache = cache
        self._graph = graph
        self._config = config
        self._runs = runs
        self._run_options = onnxruntime.RunOptions()
        # For all widths: scores are valid until the next pass. Unused rows take no memory.
        self._logits = np.empty((MAX_ROWS, config.vocab_size), graph.logits)
        self._hidden = np.empty((MAX_ROWS, config.hidden_size), graph.hidden)
        self._bound: dict[tuple[onnxruntime.InferenceSession, int], _Bound] = {}
        self._generation = cache.generation  # of the bound cache
        self._source: Mapping[str, np.ndarray] = {}  # constant extra inputs
        self._layers: tuple[int, ...] = ()  # of the features that passes return

    def prefill(self, tokens: Sequence[int]) -> None:
        """Raises ContextFullError, SessionError, DeviceMemoryError, as `forward` does."""
        self._claim()
        for at, chunk in self._chunks(tokens):
            bound = self._read(at, chunk)
            self._move(at + len(chunk))
            if bound.features is not None:
                self._report(at, bound.features)

    def forward(self, tree: TokenTree) -> Forward:
        """Raises ValueError for more than MAX_ROWS, or branches if only chains run."""
        self._claim()
        rows, start = len(tree), self.length
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        if not tree.is_chain and self._graph.bias is None:
            raise ValueError("a graph without a bias takes chains alone")
        self._reserve(rows)
        sees = None if tree.is_chain else tree.ancestors
        if start or sees is None:
            return self._score(tree.tokens, start + tree.depths, start, sees).scores
        # On an empty cache GroupQueryAttention ignores position_ids and counts rows: siblings would
        # follow each other. Score the root first.
        root = self._score(tree.tokens[:1], tree.depths[:1], 0, None)
        first = [None if each is None else each.copy() for each in root.parts]
        rest = self._score(tree.tokens[1:], tree.depths[1:], 1, sees[1:, 1:]).parts
        logits, hidden, features = (
            None if one is None or other is None else np.concatenate([one, other])
            for one, other in zip(first, rest, strict=True)
        )
        assert logits is not None and hidden is not None
        return widened(logits, hidden, features)

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError if another session wrote to the cache since, or the pass failed."""
        if self.cache.last_writer is not self:
            raise ValueError("the rows to commit are gone: the cache was written to since")
        if rows[-1] != len(rows) - 1:  # not a prefix
            self.cache.compact(self.length, rows)
        self._move(self.length + len(rows))

    def interrupt(self) -> None:
        """End a running pass before its next operation."""
        self._run_options.terminate = True

    def close(self) -> None:
        """Free buffers now: a reference cycle may live for hours."""
        self._bound.clear()
        self._logits, self._hidden = self._logits[:0].copy(), self._hidden[:0].copy()

    def _claim(self) -> None:
        """Take over the cache after the committed tokens."""

    def _move(self, length: int) -> None:
        self.length = length

    def _report(self, start: int, features: np.ndarray) -> None:
        """Report features of prefilled tokens from `start` on."""

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Make room for all tokens; yield each pass's start and tokens."""
        start = self.length
        self._reserve(len(tokens))
        for done in range(0, len(tokens), PREFILL_ROWS):
            yield start + done, np.asarray(tokens[done : done + PREFILL_ROWS])

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._config.context_length)
        self.cache.reserve(self.length + max(rows, MIN_ATTENDED), self.length)
        if self._generation != self.cache.generation:  # the cache has grown
            self._bound.clear()
            self._generation = self.cache.generation

    def _read(self, start: int, tokens: np.ndarray, outputs: Sequence[str] = ()) -> _Bound:
        """Run a prefill pass, whose one scored row is ignored. outputs: extra ones to bind."""
        rows = len(tokens)
        with translated(rows, start):
            bound = self._bind(rows, np.array([rows - 1]))
            for name in outputs:
                bound.binding.bind_output(name)
            self._run(bound, tokens, start + np.arange(rows), start)
        return bound

    def _bind(self, rows: int, scored: np.ndarray, is_stacked: bool = False) -> _Bound:
        graph, config = self._graph, self._config
        binding = graph.inference.io_binding()
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
        if self._runs is not None:
            constant["no_update"] = np.zeros((1, rows, config.hidden_size), np.float32)
            for sublayer in range(len(self._runs)):
                constant[f"runs.{sublayer}"] = self._runs[sublayer : sublayer + 1]
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
        """Run a pass. sees: [rows, rows] bool, None for a chain."""
        rows, inference = len(tokens), self._graph.inference
        with translated(rows, start):
            bound = self._bound.get((inference, rows))
            if bound is None:
                bound = self._bind(rows, np.arange(rows), self._graph.has_stacked)
                self._bound[inference, rows] = bound
            self._run(bound, tokens, positions, start, sees)
        return bound

    def _run(
        self,
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
            elif name in self._graph.inputs:
                bound.binding.bind_cpu_input(name, values)
                if isinstance(self.cache, HostCache):
                    bound.written[name] = values
        if bound.mask is not None:
            bound.mask.show(start, sees)
        elif self._graph.bias is not None:
            mask = attention_mask(self._graph.bias, bound.attended, start, sees)
            bound.binding.bind_cpu_input(BIAS, mask)
        self.cache.last_writer = None
        self._graph.inference.run_with_iobinding(bound.binding, self._run_options)
        self.cache.last_writer = self


class OrtSession(_Passes[Cache]):
    """A session with its own cache. On devices it has no parts: their graph would need its own
    weights."""

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        if self.cache.last_writer is self:
            self.cache.last_writer = None
        self._move(length)

    def state(self) -> dict[str, np.ndarray]:
        return self.cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self.cache.restore(state, length)
        self._move(length)

    def close(self) -> None:
        super().close()
        self.cache.clear()


class PartialSession(_Passes[HostCache]):
    """A part of `target`; peers: all of its parts."""

    _runs: np.ndarray

    def __init__(
        self, graph: Graph, target: HostSession, runs: np.ndarray, peers: list[PartialSession]
    ) -> None:
        super().__init__(graph, target._config, target.cache, runs)
        self.length = target.length
        self._target = target
        self._peers = peers

    @property
    def skipped(self) -> frozenset[int]:
        """Sublayers left out: 2 * layer is attention, 2 * layer + 1 the MLP.

        Can be set between passes at no cost. Raises UsageError for an unknown one.
        """
        return frozenset(np.flatnonzero(~self._runs).tolist())

    @skipped.setter
    def skipped(self, skipped: frozenset[int]) -> None:
        unknown = skipped.difference(range(len(self._runs)))
        if unknown:
            raise UsageError(
                f"the model has no sublayer {min(unknown)}",
                remedy=f"Choose from 0 to {len(self._runs) - 1}.",
            )
        self._runs[:] = True
        self._runs[list(skipped)] = False

    def rollback(self, length: int) -> None:
        """Roll back to any length that this or its target has reached."""
        require_rollback(max(self.length, self._target.length), length)
        self.length = length

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        """Return [2 * layers] float64: 1 - cosine similarity of the full model's residual stream
        before and after each sublayer, averaged over `tokens` after the committed ones.

        Block influence: Men et al. 2024, ShortGPT. Commits nothing. Raises ContextFullError.
        """
        self._claim()
        runs = self._runs.copy()
        self._runs[:] = True
        turned = np.zeros(len(runs))
        names = ["embedded", *(f"update.{sublayer}" for sublayer in range(len(runs)))]
        try:
            for at, chunk in self._chunks(tokens):
                found = self._read(at, chunk, names).binding.get_outputs()[-len(names) :]
                self.cache.last_writer = None  # so that no row can be committed
                before, *updates = (each.numpy()[0] for each in found)
                for sublayer, update in enumerate(updates):
                    after = before + update
                    turned[sublayer] += np.sum(1 - _cosines(before, after))
                    before = after
        finally:
            self._runs[:] = runs
        return turned / len(tokens)

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
        super().close()

    def _claim(self) -> None:
        """Raises ValueError if a pass would overwrite the target's committed tokens."""
        if self.length < self._target.length:
            raise ValueError(
                f"a pass at {self.length} tokens would overwrite some of the "
                f"{self._target.length} that the target has committed"
            )
        for peer in self._peers:
            peer.length = min(peer.length, self.length)


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return each row's cosine; [rows, hidden] float32 -> [rows] float64."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    similar: np.ndarray = np.sum(a * b, axis=1) / np.sqrt(
        np.sum(a * a, axis=1) * np.sum(b * b, axis=1)
    )
    return similar


class HostSession(OrtSession[HostCache]):
    """A CPU session. After each call, its parts have committed exactly what it has."""

    def __init__(self, config: ModelConfig, graphs: ModelGraphs) -> None:
        graph = Graph.of(graphs.whole)
        # One token more than the context (MIN_ATTENDED).
        cache = HostCache(config, graph.has_stacked, graph.cache, spare_tokens=1)
        super().__init__(graph, config, cache)
        self._graphs = graphs
        self._parts: list[PartialSession] = []
        self._on_prefilled: OnPrefilled | None = None  # set while features are collected
        self._threads = graphs.governor()

    def forward(self, tree: TokenTree) -> Forward:
        started_s = time.perf_counter()
        out = super().forward(tree)
        if self._threads is not None:
            before = self._threads.threads
            threads = self._threads.observe(len(tree), time.perf_counter() - started_s)
            inference = None if threads == before else self._graphs.with_threads(threads)
            if inference is not None:
                self._use(inference)
        return out

    def join(self, rows: int) -> None:
        """Make room for a shared pass; `joined` lets rows be committed. Raises ContextFullError."""
        self._claim()
        self._reserve(rows)
        self.cache.last_writer = None

    def joined(self) -> None:
        self.cache.last_writer = self

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self.cache.shrink(length)

    @property
    def collects(self) -> bool:
        return self._on_prefilled is not None

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """See `edge_spec.core.features.GivesFeatures`. The first call reloads the graph, for later
        sessions, too. Raises BundleError."""
        require_layers(layers, self._config.num_layers)
        if not layers and not self.collects:
            return
        inference = self._graphs.open_featured(layers)
        self._layers = tuple(layers)
        self._bound.clear()
        self._use(inference)
        self._on_prefilled = on_prefilled if layers else None

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """See `edge_spec.core.features.SharesKeysValues`. Always available."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.cache.of_layer(layer)
        return keys[:, : self.length], values[:, : self.length]

    def attend_to(self, source: Sequence[int]) -> None:
        self._source = self._graphs.encode(source)
        self._bound.clear()

    def close(self) -> None:
        self._parts.clear()
        super().close()

    def open_exit(self, num_layers: int) -> PartialSession:
        """See `edge_spec.core.model.SelfDrafting`; costs what `open_skipping` does."""
        layers = self._config.num_layers
        if not 1 <= num_layers < layers:
            raise UsageError(
                f"no exit after {num_layers} of {layers} layers",
                remedy=f"Choose 1 to {layers - 1}.",
            )
        return self.open_skipping(frozenset(range(2 * num_layers, 2 * layers)))

    def open_skipping(self, skipped: frozenset[int]) -> PartialSession:
        """See `edge_spec.core.model.SelfDrafting`. The first call copies the packed weights (145 MB
        for the demo model) for all parts."""
        runs = np.ones(2 * self._config.num_layers, np.bool_)
        part = PartialSession(Graph.of(self._graphs.open_partial()), self, runs, self._parts)
        part.skipped = skipped
        self._parts.append(part)
        return part

    def _use(self, inference: onnxruntime.InferenceSession) -> None:
        self._graph = replace(self._graph, inference=inference)

    def _claim(self) -> None:
        self._move(self.length)

    def _move(self, length: int) -> None:
        self.length = length
        for part in self._parts:
            part.length = length

    def _report(self, start: int, features: np.ndarray) -> None:
        if self._on_prefilled is not None:
            self._on_prefilled(start, features)


class OrtSourceSession(SourceSession):
    """A session with a source that can be interrupted."""

    def __init__(self, decoder: HostSession, config: ModelConfig) -> None:
        assert config.encoder is not None
        super().__init__(decoder, config.encoder, config.context_length)
        self.interrupt = decoder.interrupt
