"""Runs trained heads as exporters/heads stores them, one graph a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from edge_spec.core.heads import (
    WEIGHTS_FILE,
    BlockRows,
    DFlashHead,
    EagleHead,
    EntryRows,
    HeadScores,
    StoredStep,
)
from edge_spec.core.rope import Rope
from edge_spec.errors import EdgeSpecError, ModelFileError
from edge_spec.runtimes.ort.graph_loader import WEIGHTS_FOLDER
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.rows import OwnProducts
from edge_spec.runtimes.ort.signature import bind_output

# Threads spin between products, but not after a step: the target needs the cores.
_WAITS_AWAKE = {"session.intra_op.spin_duration_us": "100", "session.force_spinning_stop": "1"}
_POSITIONS = 1024  # of rotary tables made at once


class OrtMedusaStep:
    """Medusa heads in a graph of exporters/heads/step_graph.py."""

    def __init__(self, stored: StoredStep, threads: int | None) -> None:
        self._session = _opened(stored, "Medusa heads", threads)
        asked = {each.name: each.shape for each in self._session.get_inputs()}.get("asked")
        self._num_heads = None if asked is None else asked[0]  # None: all are always scored

    def __call__(self, state: np.ndarray, heads: Sequence[int]) -> HeadScores:
        inputs, rows = {"state": state[None]}, list(heads)
        if self._num_heads is not None:
            inputs["asked"] = np.isin(np.arange(self._num_heads), rows)
            rows = list(range(len(rows)))
        found = self._session.run(["logits", "likeliest", "shares"], inputs)
        return HeadScores(*(each[rows] for each in found))


class OrtLayers:
    """The layers of a head in a graph of exporters/heads/step_graph.py."""

    def __init__(
        self, stored: StoredStep, head: EagleHead | DFlashHead, threads: int | None
    ) -> None:
        config = head.config
        self._bound: Any = BoundBlock if isinstance(head, DFlashHead) else BoundStep
        self.session = _opened(stored, "the layers of a head", threads)
        self._rotated = config.rotated
        self._rope = Rope(config.rope_theta, config.rope_scaling)
        self._tables = self._rope.tables(0, config.rotated)

    def bound_to(self, cache: np.ndarray) -> Any:
        return self._bound(self, cache)

    def rotary_tables(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin for at least these positions, [some, rotated / 2] float32 each."""
        if len(self._tables[0]) < positions:
            self._tables = self._rope.tables(max(_POSITIONS, 2 * positions), self._rotated)
        return self._tables


class BoundStep:
    """A step on a cache that onnxruntime writes in place."""

    def __init__(self, layers: OrtLayers, cache: np.ndarray) -> None:
        self._layers = layers
        self._cache = cache  # keeps bound memory alive
        self._turning: tuple[np.ndarray, ...] = ()  # bound rotary tables
        self._binding = layers.session.io_binding()
        self._last, self._total = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._binding.bind_cpu_input("seqlens_k", self._last)
        self._binding.bind_cpu_input("total_sequence_length", self._total)
        for layer, both in enumerate(cache):
            for part, buffer in zip(("key", "value"), both, strict=True):
                self._binding.bind_cpu_input(f"past.{layer}.{part}", buffer[None])
                bind_output(self._binding, f"present.{layer}.{part}", buffer[None])

    def __call__(self, rows: EntryRows) -> tuple[np.ndarray, np.ndarray]:
        count, binding = len(rows.positions), self._binding
        total = rows.start + count
        self._last[0], self._total[...] = total - 1, total
        bias = np.zeros((1, 1, count, total), np.float32)
        if rows.sees is not None:
            bias[0, 0][~rows.sees] = -np.inf
        turning = self._layers.rotary_tables(int(rows.positions.max()) + 1)
        if turning is not self._turning:
            self._turning = turning
            for name, table in zip(("cos", "sin"), turning, strict=True):
                binding.bind_cpu_input(name, table)
        inputs = {
            "embedded": rows.embedded[None],
            "found": rows.found[None],
            "replaced": rows.states[None],
            "order": rows.order,
            "position_ids": rows.positions[None],
            "attention_bias": bias,
            "logit_rows": rows.scored,
        }
        for name, values in inputs.items():
            binding.bind_cpu_input(name, values)
        binding.bind_output("states")
        binding.bind_output("logits")
        self._layers.session.run_with_iobinding(binding)
        states, logits = binding.get_outputs()[-2:]  # in binding order
        return states.numpy()[0], logits.numpy()[0]


class BoundBlock:
    """A block step; the graph reads the cache in place, and its few new entries are copied."""

    def __init__(self, layers: OrtLayers, cache: np.ndarray) -> None:
        self._layers = layers
        names = [f"{layer}.{part}" for layer in range(len(cache)) for part in ("key", "value")]
        self._entries = [part for both in cache for part in both]  # [heads, slots, head_dim] each
        self._past = {
            f"past.{name}": part[None] for name, part in zip(names, self._entries, strict=True)
        }
        told = {each.name for each in layers.session.get_outputs()}
        scores = ["logits", "likeliest", "shares", *({"states"} & told)]
        self._outputs = [*scores, *(f"made.{name}" for name in names)]

    def __call__(self, rows: BlockRows) -> HeadScores:
        known, block = len(rows.found), len(rows.embedded)
        slots, end = self._entries[0].shape[1], rows.start + known
        bias = np.full((1, 1, 1, slots), -np.inf, np.float32)
        bias[..., max(end - rows.num_seen, 0) : rows.start] = 0
        positions = np.arange(rows.position, rows.position + known + block)
        cos, sin = self._layers.rotary_tables(int(positions[-1]) + 1)
        inputs = self._past | {
            "embedded": rows.embedded[None],
            "found": rows.found[None],
            "position_ids": positions[None],
            "block_position_ids": positions[None, known:],
            "cos": cos,
            "sin": sin,
            "attention_bias": bias,
            "parts": np.array([known, block]),
            "widths": np.array([slots, known + block]),
            "logit_rows": np.array(rows.scored, np.int64),
        }
        found = self._layers.session.run(self._outputs, inputs)
        scores, made = found[: -len(self._entries)], found[-len(self._entries) :]
        for kept, each in zip(self._entries, made, strict=True):
            kept[:, rows.start : end] = each[0]
        return HeadScores(*scores)


def _opened(stored: StoredStep, what: str, threads: int | None) -> onnxruntime.InferenceSession:
    """Open a graph, with our kernels where they fit. Raises ModelFileError."""
    library = import_onnxruntime()
    weights = stored.weights
    folder = weights.parent if isinstance(weights, Path) else None

    def options(folder: Path | None) -> Any:
        made = library.SessionOptions()
        made.log_severity_level = 3
        made.intra_op_num_threads = threads or 1
        for name, value in _WAITS_AWAKE.items():
            made.add_session_config_entry(name, value)
        if isinstance(weights, bytes):
            made.add_external_initializers_from_files_in_memory(
                [WEIGHTS_FILE], [weights], [len(weights)]
            )
        else:
            made.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
        return made

    def load(graph: Path | bytes, chosen: Any) -> Any:
        return library.InferenceSession(graph, chosen, providers=["CPUExecutionProvider"])

    try:
        return OwnProducts().load(stored.graph, folder, threads or 1, options, load)
    except EdgeSpecError:
        raise
    except Exception as error:  # onnxruntime's share no base class
        raise ModelFileError(
            f"onnxruntime cannot load {what}: {error}", remedy="Update onnxruntime."
        ) from error
