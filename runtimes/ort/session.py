"""One KV cache over an onnxruntime session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from edge_spec.architecture import ModelConfig
from edge_spec.errors import SessionError
from edge_spec.model import Forward, require_rollback, require_room
from edge_spec.runtimes.ort.cache import KvCache
from edge_spec.tree import TokenTree

MAX_ROWS = 64
PREFILL_ROWS = 256
MIN_ATTENDED = 2  # rows that attention computes: see exporters/onnx/graph.py


@dataclass(frozen=True, eq=False)
class _Bound:
    """Buffers bound once for passes of one width; only their contents change."""

    binding: onnxruntime.IOBinding
    input_ids: np.ndarray  # [1, rows] int64
    position_ids: np.ndarray  # [1, attended] int64
    bias: np.ndarray  # [attended * capacity] float32, zero between passes
    logits: np.ndarray  # [scored, vocab] float32
    hidden: np.ndarray  # [scored, hidden] float32


class OrtSession:
    """A pass costs one `run_with_iobinding`; numpy and onnxruntime share every buffer."""

    def __init__(self, inference: onnxruntime.InferenceSession, config: ModelConfig) -> None:
        self.length = 0
        self._inference = inference
        self._config = config
        self._cache = KvCache(config)
        self._last = np.zeros(1, np.int32)  # seqlens_k
        self._total = np.zeros((), np.int32)
        self._bound: dict[int, _Bound] = {}

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[start : start + PREFILL_ROWS]
            rows = len(chunk)
            # The head has to score something: the last row, whose scores are not used.
            bound = self._bind(rows, np.array([rows - 1]))
            bound.input_ids[0] = chunk
            bound.position_ids[0] = np.arange(self.length, self.length + rows)
            self._run(bound)
            self.length += rows

    def forward(self, tree: TokenTree) -> Forward:
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        self._reserve(rows)
        sees = None if tree.is_chain else tree.ancestors
        if self.length or sees is None:
            bound = self._score(tree.tokens, tree.depths, sees)
            return Forward(bound.logits, bound.hidden)
        # On an empty cache GroupQueryAttention ignores position_ids and counts rows itself, so
        # that siblings would follow each other: the root has to go before the others.
        root = self._score(tree.tokens[:1], tree.depths[:1], None)
        first = (root.logits.copy(), root.hidden.copy())
        self.length = 1
        try:
            rest = self._score(tree.tokens[1:], tree.depths[1:] - 1, sees[1:, 1:])
        finally:
            self.length = 0
        return Forward(
            np.concatenate([first[0], rest.logits]), np.concatenate([first[1], rest.hidden])
        )

    def commit(self, rows: Sequence[int]) -> None:
        if rows[-1] != len(rows) - 1:  # not simply the first rows
            self._cache.compact(self.length, rows)
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length

    def close(self) -> None:
        self._bound.clear()
        self._cache = KvCache(self._config)

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._config.context_length)
        if self._cache.reserve(self.length + max(rows, MIN_ATTENDED), self.length):
            self._bound.clear()

    def _bind(self, rows: int, scored: np.ndarray) -> _Bound:
        binding = self._inference.io_binding()
        self._cache.bind(binding)
        config = self._config
        attended = max(rows, MIN_ATTENDED)
        bound = _Bound(
            binding=binding,
            input_ids=np.zeros((1, rows), np.int64),
            position_ids=np.zeros((1, attended), np.int64),
            bias=np.zeros(attended * self._cache.capacity, np.float32),
            logits=np.empty((len(scored), config.vocab_size), np.float32),
            hidden=np.empty((len(scored), config.hidden_size), np.float32),
        )
        binding.bind_cpu_input("input_ids", bound.input_ids)
        binding.bind_cpu_input("attention_rows", np.minimum(np.arange(attended), rows - 1))
        binding.bind_cpu_input("kept_rows", np.arange(rows))
        binding.bind_cpu_input("position_ids", bound.position_ids)
        binding.bind_cpu_input("logit_rows", scored.astype(np.int64))
        binding.bind_cpu_input("seqlens_k", self._last)
        binding.bind_cpu_input("total_sequence_length", self._total)
        for name, buffer in (("logits", bound.logits), ("hidden", bound.hidden)):
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))
        return bound

    def _score(self, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray | None) -> _Bound:
        """One pass; sees: [rows, rows] bool, None for a chain."""
        rows = len(tokens)
        bound = self._bound.get(rows)
        if bound is None:
            bound = self._bound[rows] = self._bind(rows, np.arange(rows))
        bound.input_ids[0] = tokens
        np.add(depths, self.length, out=bound.position_ids[0])
        self._run(bound, sees)
        return bound

    def _run(self, bound: _Bound, sees: np.ndarray | None = None) -> None:
        rows = bound.position_ids.shape[1]
        total = self.length + rows
        self._last[0] = total - 1
        self._total[...] = total
        # The operator masks causally by itself, so a chain needs no bias but zeros.
        bias = bound.bias[: rows * total].reshape(1, 1, rows, total)
        if sees is not None:
            bias[0, 0, :, self.length :] = np.where(sees, 0.0, -np.inf)
        bound.binding.bind_cpu_input("attention_bias", bias)
        try:
            self._inference.run_with_iobinding(bound.binding)
        except Exception as error:
            raise SessionError(
                f"onnxruntime failed on {rows} rows at {self.length} tokens: {error}",
                remedy="Try fewer rows (--draft-n-max) or another --device.",
            ) from error
        finally:
            if sees is not None:
                bias[0, 0, :, self.length :] = 0.0
