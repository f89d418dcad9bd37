"""Passes of one graph over a KV cache that others may share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_room
from edge_spec.core.tree import TokenTree, chain_parents, parents_seen, preceding
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS, KvCache
from edge_spec.runtimes.ort.graph_forms import FeatureBuffers
from edge_spec.runtimes.ort.signature import (
    STACKED,
    Signature,
    StackedMask,
    bind_cache,
    bind_output,
    has_stacked,
    pass_error,
    takes_form,
    widened,
)

MIN_ATTENDED = 2  # rows that attention computes: see exporters/onnx/graph.py


@dataclass(frozen=True, eq=False)
class _Bound:
    """Buffers bound once for passes of one width; only their contents change."""

    binding: onnxruntime.IOBinding
    input_ids: np.ndarray  # [1, rows] int64
    position_ids: np.ndarray  # [1, attended] int64
    bias: np.ndarray  # [attended * capacity], zero between passes; empty where there is none
    ancestors: np.ndarray  # [preceding, attended] int64
    mask: StackedMask | None  # of a stacked pass
    logits: np.ndarray  # [scored, vocab]
    hidden: np.ndarray  # [scored, hidden]
    features: np.ndarray | None  # [rows, features, hidden]

    @property
    def scores(self) -> Forward:
        scores = widened(self.logits, self.hidden)
        return scores if self.features is None else replace(scores, features=self.features)


class Passes:
    """A pass costs one `run_with_iobinding`; numpy and onnxruntime share every buffer.

    `start` is the number of cached tokens that a pass continues: what stands after them is
    overwritten. `runs` [2 * layers] bool, of a graph of exporters/onnx/graph.py: the sublayers
    that the next pass runs; None for a graph without a choice.
    """

    def __init__(
        self,
        inference: onnxruntime.InferenceSession,
        config: ModelConfig,
        cache: KvCache,
        runs: np.ndarray | None = None,
    ) -> None:
        self.runs = runs
        self._inference = inference
        self._signature = Signature.of(inference)
        self._has_stacked = has_stacked(inference)
        self._takes_form = takes_form(inference)
        self._run_options = onnxruntime.RunOptions()
        self._config = config
        self.cache = cache
        self._last = np.zeros(1, np.int32)  # seqlens_k
        self._total = np.zeros((), np.int32)
        self.cached = np.zeros(1, np.int64)  # cached_tokens
        # One for all widths, since scores are valid until the next pass. Rows that are never used
        # take no memory.
        self._logits = np.empty((MAX_ROWS, config.vocab_size), self._signature.logits)
        self._hidden = np.empty((MAX_ROWS, config.hidden_size), self._signature.hidden)
        self._bound: dict[int, _Bound] = {}
        self._others: dict[onnxruntime.InferenceSession, dict[int, _Bound]] = {}  # bound likewise
        self._generation = cache.generation  # of the cache that is bound
        self._source: Mapping[str, np.ndarray] = {}  # further inputs, the same in all passes
        self._layers: tuple[int, ...] = ()  # whose features passes give

    def attend_to(self, source: Mapping[str, np.ndarray]) -> None:
        """source: the keys and values of one, by their inputs' names, for all passes from now."""
        self._source = source
        self._bound.clear()
        self._others.clear()

    def collect(self, inference: onnxruntime.InferenceSession, layers: Sequence[int]) -> None:
        """The next passes give these features, by a graph that has them."""
        self._inference, self._layers = inference, tuple(layers)
        self._bound.clear()
        self._others.clear()

    def prefill(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, np.ndarray | None]]:
        """Yields the number of cached tokens after each pass, and its features, if any,
        [rows, features, hidden] float32. Raises ContextFullError."""
        self._reserve(len(tokens), start)
        for done in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[done : done + PREFILL_ROWS]
            bound = self._bind_reading(len(chunk))
            self._read(bound, chunk, start + done)
            yield start + done + len(chunk), bound.features

    def score(self, tree: TokenTree, start: int) -> Forward:
        """Raises ContextFullError, SessionError, ValueError for more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        self._reserve(rows, start)
        sees = None if tree.is_chain else tree.ancestors
        if start or sees is None:
            return self._score(tree.tokens, start + tree.depths, start, sees).scores
        # On an empty cache GroupQueryAttention ignores position_ids and counts rows itself, so
        # that siblings would follow each other: the root has to go before the others.
        root = self._score(tree.tokens[:1], tree.depths[:1], 0, None)
        first = (root.logits.copy(), root.hidden.copy())
        features = None if root.features is None else root.features.copy()
        rest = self._score(tree.tokens[1:], tree.depths[1:], 1, sees[1:, 1:])
        scores = widened(
            np.concatenate([first[0], rest.logits]), np.concatenate([first[1], rest.hidden])
        )
        if features is None or rest.features is None:
            return scores
        return replace(scores, features=np.concatenate([features, rest.features]))

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

        Raises ValueError where another session has written to the cache since.
        """
        if self.cache.last_writer is not self:
            raise ValueError("the rows to commit are gone: the cache was written to since")
        if rows[-1] != len(rows) - 1:  # not simply the first rows
            self.cache.compact(start, rows)

    def updates(self, tokens: Sequence[int], start: int) -> Iterator[list[np.ndarray]]:
        """Gives for each pass over a part of `tokens`: the embedded rows, then what each sublayer
        adds to them, [rows, hidden] float32. Raises ContextFullError."""
        self._reserve(len(tokens), start)
        names = ["embedded", *(f"update.{k}" for k in range(2 * self._config.num_layers))]
        for done in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[done : done + PREFILL_ROWS]
            bound = self._bind_reading(len(chunk))
            found = [np.empty((1, len(chunk), self._config.hidden_size), np.float32) for _ in names]
            for name, buffer in zip(names, found, strict=True):
                bind_output(bound.binding, name, buffer)
            self._read(bound, chunk, start + done)
            self.cache.last_writer = None  # none of these rows can be committed
            yield [buffer[0] for buffer in found]

    def interrupt(self) -> None:
        """A pass ends before its next operation: what an operation does cannot be interrupted."""
        self._run_options.terminate = True

    def use(self, inference: onnxruntime.InferenceSession) -> None:
        """Runs the next passes with another session of the same graph."""
        if inference is not self._inference:
            self._others[self._inference] = self._bound
            self._inference, self._bound = inference, self._others.pop(inference, {})

    def close(self) -> None:
        """Gives its memory back now: whoever holds this may be part of a cycle, which Python may
        keep for hours."""
        self._bound.clear()
        self._others.clear()
        self._logits = np.empty((0, self._config.vocab_size), np.float32)
        self._hidden = np.empty((0, self._config.hidden_size), np.float32)

    def _reserve(self, rows: int, start: int) -> None:
        require_room(start, rows, self._config.context_length)
        self.cache.reserve(start + max(rows, MIN_ATTENDED), start)
        if self._generation != self.cache.generation:  # this session or another has grown it
            self._bound.clear()
            self._others.clear()
            self._generation = self.cache.generation

    def _bind_reading(self, rows: int) -> _Bound:
        """The head has to score something: the last row, whose scores are not used."""
        return self._bind(rows, np.array([rows - 1]))

    def _read(self, bound: _Bound, tokens: Sequence[int], start: int) -> None:
        bound.input_ids[0] = tokens
        bound.position_ids[0] = np.arange(start, start + len(tokens))
        self._run(bound, start)

    def _bind(self, rows: int, scored: np.ndarray, is_stacked: bool = False) -> _Bound:
        binding = self._inference.io_binding()
        bind_cache(self.cache, binding)
        config, signature = self._config, self._signature
        attended = rows if is_stacked or signature.is_attended_once else max(rows, MIN_ATTENDED)
        has_bias = signature.bias is not None and not is_stacked
        mask = StackedMask(rows, self.cache.capacity) if is_stacked else None
        features = FeatureBuffers(self._layers, rows, config.hidden_size) if self._layers else None
        bound = _Bound(
            binding=binding,
            input_ids=np.zeros((1, rows), np.int64),
            position_ids=np.zeros((1, attended), np.int64),
            bias=np.zeros(attended * self.cache.capacity if has_bias else 0, signature.bias),
            ancestors=np.zeros((config.num_preceding, attended), np.int64),
            mask=mask,
            logits=self._logits[: len(scored)],
            hidden=self._hidden[: len(scored)],
            features=None if features is None else features.rows,
        )
        binding.bind_cpu_input("input_ids", bound.input_ids)
        if not signature.is_attended_once:
            binding.bind_cpu_input("attention_rows", np.minimum(np.arange(attended), rows - 1))
            binding.bind_cpu_input("kept_rows", np.arange(rows))
        binding.bind_cpu_input("position_ids", bound.position_ids)
        binding.bind_cpu_input("logit_rows", scored.astype(np.int64))
        binding.bind_cpu_input("seqlens_k", self._last)
        binding.bind_cpu_input("total_sequence_length", self._total)
        if self._takes_form:
            binding.bind_cpu_input(STACKED, np.array([is_stacked]))
        if config.convolving:
            binding.bind_cpu_input("ancestors", bound.ancestors)
        if self._takes_form or config.convolving:
            binding.bind_cpu_input("cached_tokens", self.cached)
        if mask is not None:
            binding.bind_cpu_input("attention_bias", mask.bias)
        for name, array in self._source.items():
            binding.bind_cpu_input(name, array)
        if self.runs is not None:
            binding.bind_cpu_input("no_update", np.zeros((1, rows, config.hidden_size), np.float32))
            for sublayer in range(len(self.runs)):
                binding.bind_cpu_input(f"runs.{sublayer}", self.runs[sublayer : sublayer + 1])
        bind_output(binding, "logits", bound.logits)
        bind_output(binding, "hidden", bound.hidden)
        if features is not None:
            features.bind(binding, config.num_layers)
        return bound

    def _score(
        self, tokens: np.ndarray, positions: np.ndarray, start: int, sees: np.ndarray | None
    ) -> _Bound:
        """One pass; sees: [rows, rows] bool, None for a chain."""
        rows = len(tokens)
        bound = self._bound.get(rows)
        if bound is None:
            bound = self._bound[rows] = self._bind(rows, np.arange(rows), self._has_stacked)
        bound.input_ids[0] = tokens
        bound.position_ids[0] = positions
        self._run(bound, start, sees)
        return bound

    def _run(self, bound: _Bound, start: int, sees: np.ndarray | None = None) -> None:
        rows = bound.position_ids.shape[1]
        total = start + rows
        self._last[0] = total - 1
        self._total[...] = total
        self.cached[0] = start
        self.cache.last_writer = self
        if len(bound.ancestors):
            own = bound.input_ids.shape[1]
            parents = chain_parents(own) if sees is None else parents_seen(sees)
            # One row or all: the second of a single one has the same ancestors.
            bound.ancestors[:] = preceding(parents, start, len(bound.ancestors))
        if bound.mask is not None:
            bound.mask.show(start, sees)
            self._run_bound(bound, rows, start)
            return
        if self._signature.bias is None:
            if sees is not None:
                raise ValueError("a graph without a bias takes chains alone")
            self._run_bound(bound, rows, start)
            return
        # The operator masks causally by itself, so a chain needs no bias but zeros.
        bias = bound.bias[: rows * total].reshape(1, 1, rows, total)
        try:
            if sees is not None:
                bias[0, 0, :, start:] = np.where(sees, 0.0, -np.inf)
            bound.binding.bind_cpu_input("attention_bias", bias)
            self._run_bound(bound, rows, start)
        finally:
            if sees is not None:
                bias[0, 0, :, start:] = 0.0

    def _run_bound(self, bound: _Bound, rows: int, start: int) -> None:
        try:
            self._inference.run_with_iobinding(bound.binding, self._run_options)
        except Exception as error:
            raise pass_error(error, rows, start) from error
