"""Graphs whose KV cache grows with every pass, as `exporters/optimum` writes them.

They take each layer's past and return it with the pass's rows, to be the next past, cut after a
rejection. They have no mask: only chains are scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import (
    Capabilities,
    Forward,
    RuntimeOptions,
    require_rollback,
    require_room,
    require_state,
)
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS
from edge_spec.runtimes.ort.graph_loader import GRAPH_FILE, GraphLoader
from edge_spec.runtimes.ort.signature import translated

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_PAST, _PRESENT = "past_key_values.", "present."
_PREFILL_SCORES = 1 << 24  # most logits of a prefill pass, which scores all rows


class GrowingModel:
    """A model of such a graph. Raises BundleError for another."""

    def __init__(self, bundle: Bundle, options: RuntimeOptions) -> None:
        # Memory plans are kept per shape, and each pass has a new one.
        loader = GraphLoader(bundle, options, enable_mem_pattern=False)
        self.config = loader.config
        self._inference: Any = loader.open(GRAPH_FILE)
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=False,
            rollback=True,
            hidden_states=False,
            kernels=loader.kernels,
        )
        path = bundle.file(GRAPH_FILE)
        self._caches = _read_caches(self._inference, self.config.vocab_size, path)

    def open_session(self) -> GrowingSession:
        return GrowingSession(self._inference, self._caches, self.config)

    def close(self) -> None:
        self._inference = None


class GrowingSession:
    """caches: heads and size of each cache, [1, heads, tokens, size]."""

    def __init__(
        self,
        inference: onnxruntime.InferenceSession,
        caches: Mapping[str, tuple[int, int]],
        config: ModelConfig,
    ) -> None:
        self.length = 0
        self._inference = inference
        self._caches = caches
        self._inputs = {value.name for value in inference.get_inputs()}
        self._config = config
        self._run_options = onnxruntime.RunOptions()
        self._scored = 0, 0  # rows still to commit, and where they start
        self._present: dict[str, OrtValue] = {}  # caches that the last pass returned
        self._past = self._empty(), 0  # caches and their tokens; replaced as one value

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._config.context_length)
        rows = max(1, min(PREFILL_ROWS, _PREFILL_SCORES // self._config.vocab_size))
        for done in range(0, len(tokens), rows):
            chunk = np.array(tokens[done : done + rows], np.int64)
            self._run(chunk)
            self.commit(range(len(chunk)))

    def forward(self, tree: TokenTree) -> Forward:
        """Raises ContextFullError, ValueError for branches or more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS or not tree.is_chain:
            raise ValueError(f"{rows} rows in one pass; a chain of at most {MAX_ROWS} is expected")
        require_room(self.length, rows, self._config.context_length)
        return Forward(self._run(tree.tokens.astype(np.int64)).numpy()[0])

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError unless these are the first rows of the last pass, with no change
        since."""
        scored, after = self._scored
        kept = len(rows)
        if self.length != after or not 0 < kept <= scored or list(rows) != list(range(kept)):
            raise ValueError(f"rows {list(rows)} are not the first of {scored} in a chain")
        self._past = self._present, after + scored  # the next pass cuts rejected rows
        self._forget()
        self.length += kept

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._forget()
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """Return each cache by input name, [1, heads, length, size] float32."""
        return {name: value.numpy().copy() for name, value in self._cut_past().items()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        expected = {
            name: ((1, heads, length, size), np.float32)
            for name, (heads, size) in self._caches.items()
        }
        require_state(state, expected, length, self._config.context_length)
        past = {name: OrtValue.ortvalue_from_numpy(state[name].copy()) for name in self._caches}
        self._forget()
        self._past, self.length = (past, length), length

    def interrupt(self) -> None:
        """End a running pass before its next operation."""
        self._run_options.terminate = True

    def close(self) -> None:
        self._forget()
        self._past = self._empty(), 0

    def _empty(self) -> dict[str, OrtValue]:
        return {
            name: OrtValue.ortvalue_from_numpy(np.empty((1, heads, 0, size), np.float32))
            for name, (heads, size) in self._caches.items()
        }

    def _cut_past(self) -> dict[str, OrtValue]:
        past, held = self._past
        if held != self.length:
            past = {
                name: OrtValue.ortvalue_from_numpy(value.numpy()[:, :, : self.length].copy())
                for name, value in past.items()
            }
            self._past = past, self.length
        return past

    def _forget(self) -> None:
        self._scored, self._present = (0, 0), {}

    def _run(self, tokens: np.ndarray) -> OrtValue:
        """Run a pass over [rows] int64; return logits [1, rows, vocab] float32."""
        start, rows = self.length, len(tokens)
        total = start + rows
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(start, total, dtype=np.int64)[None],
        }
        self._forget()
        past = self._cut_past()
        given = {
            name: OrtValue.ortvalue_from_numpy(inputs[name])
            for name in inputs.keys() & self._inputs
        }
        wanted = ["logits", *(name.replace(_PAST, _PRESENT) for name in past)]
        with translated(rows, start):
            logits, *present = self._inference.run_with_ort_values(
                wanted, given | past, self._run_options
            )
        self._present = dict(zip(past, present, strict=True))
        self._scored = rows, start
        return logits


def _read_caches(inference: Any, vocab_size: int, path: Path) -> dict[str, tuple[int, int]]:
    """Return heads and size of each cache input. Raises BundleError unless caches are float32
    [batch, heads, tokens, size], inputs known, and outputs one per cache and logits of this
    vocabulary."""
    inputs = {value.name: value for value in inference.get_inputs()}
    outputs = {value.name: value for value in inference.get_outputs()}
    caches = {}
    for name, value in inputs.items():
        if name in _INPUTS:
            continue
        shape: Sequence[int | str] = value.shape
        fixed = [isinstance(size, int) for size in shape[1:]]
        if not name.startswith(_PAST) or name.replace(_PAST, _PRESENT) not in outputs:
            raise _unusable(path, f"an input {name}")
        if value.type != "tensor(float)" or fixed != [True, False, True]:
            raise _unusable(path, f"{name} of {value.type} and the shape {shape}")
        caches[name] = (int(shape[1]), int(shape[3]))
    if "input_ids" not in inputs or not caches or len(outputs) != len(caches) + 1:
        raise _unusable(path, "no input_ids, past_key_values and logits alone")
    if "logits" not in outputs or outputs["logits"].shape[-1] != vocab_size:
        raise _unusable(path, f"no scores of the {vocab_size} tokens that its manifest says")
    return caches


def _unusable(path: Path, what: str) -> BundleError:
    return BundleError(
        f"{path} is no graph with growing keys and values: it has {what}",
        remedy="Export the model again.",
    )
