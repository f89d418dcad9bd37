"""Trained heads by onnxruntime, as exporters/heads stores them: whole steps, and single products.

A head's step is short, and runs between two passes of its target: its threads never wait awake.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleStep, EntryRows, HeadScores
from edge_spec.core.rope import Rope
from edge_spec.errors import ModelFileError
from edge_spec.runtimes.ort.binding import bind_output
from edge_spec.runtimes.ort.library import import_onnxruntime

_NO_SPINNING = "session.intra_op.allow_spinning"  # of threads that wait: the target needs them
_POSITIONS = 1024  # that rotary tables are made for at once


class OrtProducts:
    """stored: serialized graphs `x` -> `y` by the names of their matrices."""

    def __init__(self, stored: Mapping[str, bytes], threads: int | None) -> None:
        self._sessions = {
            name: _opened(graph, f"the matrix {name} of a head", threads)
            for name, graph in stored.items()
        }

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        product: np.ndarray = self._sessions[name].run(None, {"x": x})[0]
        return product


class OrtMedusaStep:
    """stored: a graph of exporters/heads/medusa_graph.py."""

    def __init__(self, stored: bytes, threads: int | None) -> None:
        self._session = _opened(stored, "Medusa heads", threads)

    def __call__(self, state: np.ndarray) -> HeadScores:
        return HeadScores(
            *self._session.run(["logits", "likeliest", "shares"], {"state": state[None]})
        )


class OrtEagleLayers:
    """stored: a graph of exporters/heads/step_graph.py. config: of the head."""

    def __init__(self, stored: bytes, config: ModelConfig, threads: int | None) -> None:
        self._session = _opened(stored, "the layers of a head", threads)
        self._config = config
        self._rope = Rope(config.rope_theta, config.rope_scaling)
        self._tables = self._rope.tables(0, config.rotated)

    def bound_to(self, cache: np.ndarray) -> EagleStep:
        return _BoundStep(self, self._session, cache)

    def tables(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of so many positions at least, [some, rotated / 2] float32 each; made as the
        text grows."""
        if len(self._tables[0]) < positions:
            made = max(_POSITIONS, 2 * positions)
            self._tables = self._rope.tables(made, self._config.rotated)
        return self._tables


class _BoundStep:
    """Keys and values stay where they are: onnxruntime writes into the cache's own memory."""

    def __init__(
        self, layers: OrtEagleLayers, session: onnxruntime.InferenceSession, cache: np.ndarray
    ) -> None:
        self._layers, self._session = layers, session
        self._cache = cache  # its memory is bound
        self._binding = session.io_binding()
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
        cos, sin = self._layers.tables(int(rows.positions.max()) + 1)
        inputs = {
            "embedded": rows.embedded[None],
            "found": rows.found[None],
            "replaced": rows.states[None],
            "order": rows.order,
            "position_ids": rows.positions[None],
            "cos": cos,
            "sin": sin,
            "attention_bias": bias,
            "logit_rows": rows.scored,
        }
        for name, values in inputs.items():
            binding.bind_cpu_input(name, values)
        binding.bind_output("states")
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        states, logits = binding.get_outputs()[-2:]  # in the order in which they were bound
        return states.numpy()[0], logits.numpy()[0]


def _opened(graph: bytes, what: str, threads: int | None) -> onnxruntime.InferenceSession:
    """Raises ModelFileError."""
    library = import_onnxruntime()
    options = library.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 1
    options.add_session_config_entry(_NO_SPINNING, "0")
    try:
        return library.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise ModelFileError(
            f"onnxruntime cannot load {what}: {error}", remedy="Update onnxruntime."
        ) from error
