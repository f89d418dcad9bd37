"""The session of a compiled model: it owns the KV cache, which passes read and never write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward, require_rollback, require_room
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS, KvCache
from edge_spec.runtimes.openvino.library import last_line


class OpenVinoSession:
    """A pass leaves the keys and values of its rows with the request that ran it; a commit copies
    those of the rows that are kept into the cache. So a pass that fails changes nothing."""

    def __init__(self, compiled: Any, config: ModelConfig, device: str) -> None:
        self.length = 0
        self._config = config
        self._device = device
        self._request: Any = compiled.create_infer_request()
        self._inputs = {value.any_name for value in compiled.inputs}
        self._cache = KvCache(config, is_read_whole=True)
        self._generation = 0  # of the cache that is bound
        self._given: dict[str, np.ndarray] = {}  # the library reads them, and does not hold them
        self._scored = 0  # rows of the last pass that can still be committed
        self._is_interrupted = False

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._config.context_length)
        for start in range(0, len(tokens), PREFILL_ROWS):
            chunk = np.asarray(tokens[start : start + PREFILL_ROWS])
            rows = len(chunk)
            sees = np.tri(rows, dtype=bool)
            self._run(chunk, np.arange(rows), sees, np.array([rows - 1]))
            self.commit(range(rows))

    def forward(self, tree: TokenTree) -> Forward:
        """Raises ContextFullError, SessionError, ValueError for more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        require_room(self.length, rows, self._config.context_length)
        self._run(tree.tokens, tree.depths, tree.ancestors, np.arange(rows))
        return Forward(self._output("logits"), self._output("hidden"))

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError where these are no rows of the last pass, or something followed it."""
        kept = np.asarray(rows)
        if not len(kept) or kept.max() >= self._scored:
            raise ValueError(f"rows {list(rows)} are not of the last pass, of {self._scored}")
        for name, buffer in self._cache.buffers():
            written = self._output(f"present.{name}")
            buffer[:, :, self.length : self.length + len(kept)] = written[:, :, kept]
        self.length += len(kept)
        self._scored = 0

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length, self._scored = length, 0

    def state(self) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] float32."""
        return self._cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, and changes nothing then."""
        self._cache.restore(state, length)
        self.length, self._scored = length, 0

    def interrupt(self) -> None:
        """Ends the pass that runs before its next operation, if the plugin can, and refuses later
        ones."""
        self._is_interrupted = True
        self._request.cancel()

    def close(self) -> None:
        self._request = None
        self._given.clear()
        self._cache.clear()
        self._scored = 0

    def _output(self, name: str) -> Any:
        return self._request.get_tensor(name).data

    def _run(
        self, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray, scored: np.ndarray
    ) -> None:
        """One pass over rows after the cached tokens; sees: [rows, rows] bool."""
        rows = len(tokens)
        self._cache.reserve(self.length + rows, self.length)
        slots = self._cache.capacity
        bias = np.full((1, 1, rows, slots + rows), -np.inf, np.float32)
        bias[..., : self.length] = 0.0
        bias[0, 0, :, slots:][sees] = 0.0
        self._scored = 0
        self._bind_cache()
        self._give("input_ids", tokens.astype(np.int64)[None])
        self._give("position_ids", (self.length + depths).astype(np.int64)[None])
        self._give("logit_rows", scored.astype(np.int64))
        self._give("attention_bias", bias)
        if "total_sequence_length" in self._inputs:  # of windows
            self._give("total_sequence_length", np.array(slots + rows, np.int32))
        try:
            if self._is_interrupted:
                raise RuntimeError("the session was interrupted")
            self._request.start_async()
            self._request.wait()
        except Exception as error:  # the library's, which share no base class
            raise SessionError(
                f"openvino failed on {rows} rows at {self.length} tokens on {self._device}: "
                f"{last_line(error)}",
                remedy="Try fewer rows (--draft-n-max) or another --device.",
            ) from error
        self._scored = rows

    def _give(self, name: str, values: np.ndarray) -> None:
        self._given[name] = values
        self._request.set_tensor(name, shared(values))

    def _bind_cache(self) -> None:
        if self._generation == self._cache.generation:
            return
        for name, buffer in self._cache.buffers():
            self._give(f"past.{name}", buffer)
        self._generation = self._cache.generation


def shared(values: np.ndarray) -> Any:
    """Returns a tensor over the array's own memory."""
    from openvino import Tensor

    return Tensor(values, shared_memory=True)
