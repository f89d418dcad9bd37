"""Inputs and outputs of graphs (graph_forms.py), and attention's extra inputs
(exporters/onnx/attention.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Forward
from edge_spec.core.tree import chain_parents, parents_seen, preceding
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, SessionError

_PAST = "past."  # prefix of caches
_ELEMENTS: Mapping[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
}
STACKED = "stacked"  # input of graphs with both attention forms
BIAS = "attention_bias"


@dataclass(frozen=True, eq=False)
class Graph:
    """A loaded graph with caches. has_stacked: narrow passes are stacked."""

    inference: onnxruntime.InferenceSession
    inputs: frozenset[str]
    cache: np.dtype[Any]  # keys and values
    logits: np.dtype[Any]
    hidden: np.dtype[Any]
    bias: np.dtype[Any] | None  # None: chains only
    has_stacked: bool

    @classmethod
    def of(cls, inference: onnxruntime.InferenceSession) -> Graph:
        """Raises KeyError for types that no form has."""
        taken = {value.name: value.type for value in inference.get_inputs()}
        given = {value.name: value.type for value in inference.get_outputs()}
        return cls(
            inference,
            frozenset(taken),
            cache=_ELEMENTS[next(kind for name, kind in taken.items() if name.startswith(_PAST))],
            logits=_ELEMENTS[given["logits"]],
            hidden=_ELEMENTS[given["hidden"]],
            bias=_ELEMENTS[taken[BIAS]] if BIAS in taken else None,
            has_stacked=STACKED in taken,
        )

    def bind(
        self, binding: onnxruntime.IOBinding, values: Mapping[str, np.ndarray], suffix: str = ""
    ) -> None:
        """Bind the values that the graph takes. suffix: of names."""
        for name, array in values.items():
            if name + suffix in self.inputs:
                binding.bind_cpu_input(name + suffix, array)


def widened(logits: np.ndarray, hidden: np.ndarray, features: np.ndarray | None = None) -> Forward:
    """Return a pass's scores as float32. Raises SessionError for float16 ones that are not finite:
    the pass overflowed and is meaningless."""
    if logits.dtype == np.float32:
        return Forward(logits, hidden, features)
    logits, hidden = logits.astype(np.float32), hidden.astype(np.float32, copy=False)
    for values in (logits, hidden):
        with np.errstate(invalid="ignore"):  # infinities of both signs
            sums = values.sum(axis=-1)  # not finite if any value is not
        if not np.isfinite(sums).all():
            raise SessionError(
                "float16 cannot hold what this model computes: its scores are no numbers",
                remedy="Choose --device cpu, which computes in float32.",
            )
    return Forward(logits, hidden, features)


def bind_output(binding: onnxruntime.IOBinding, name: str, buffer: np.ndarray) -> None:
    binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))


# Messages of onnxruntime's arena, C++ and CUDA.
_OUT_OF_MEMORY = re.compile(r"failed to allocate|bad_?alloc|out of memory", re.IGNORECASE)


@contextmanager
def translated(rows: int, start: int) -> Iterator[None]:
    """Turn onnxruntime's errors in a pass of `rows` after `start` tokens into SessionError,
    DeviceMemoryError."""
    try:
        yield
    except (EdgeSpecError, MemoryError):
        raise
    except Exception as error:  # onnxruntime's share no base class
        what = f"onnxruntime failed on {rows} rows at {start} tokens: {error}"
        if _OUT_OF_MEMORY.search(str(error)):
            remedy = "Give a shorter --context, or another --device."
            raise DeviceMemoryError(what, remedy=remedy) from error
        remedy = "Try fewer rows (--draft-n-max) or another --device."
        raise SessionError(what, remedy=remedy) from error


def attention_inputs(
    config: ModelConfig, positions: np.ndarray, sees: np.ndarray | None, start: int, attended: int
) -> dict[str, np.ndarray]:
    """Return attention's inputs for a session's rows, except the mask.

    positions: [rows]. sees: [rows, rows] bool, None for a chain. attended: the operator's rows; a
    single row is repeated.
    """
    total = start + attended
    own = slice(None) if attended == len(positions) else np.zeros(attended, np.int64)
    inputs: dict[str, np.ndarray] = {
        "position_ids": positions.astype(np.int64)[own][None],
        "seqlens_k": np.array([total - 1], np.int32),
        "total_sequence_length": np.array(total, np.int32),
        "cached_tokens": np.array([start]),
    }
    if config.convolving:
        parents = chain_parents(len(positions)) if sees is None else parents_seen(sees)
        before = preceding(parents, start, config.num_preceding)
        inputs["ancestors"] = np.ascontiguousarray(before[:, own])
    return inputs


def attention_mask(
    element: np.dtype[Any], rows: int, start: int, sees: np.ndarray | None
) -> np.ndarray:
    """Return an unstacked pass's mask, [1, 1, rows, start + rows]. sees: [rows, rows] bool; None
    for a chain: zeros, as the operator is causal. All see cached tokens."""
    mask = np.zeros((1, 1, rows, start + rows), element)
    if sees is not None:
        mask[0, 0, :, start:] = np.where(sees, 0.0, -np.inf)
    return mask


class StackedMask:
    """The mask of stacked passes of one width over the whole cache, updated incrementally."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.bias = np.full((1, 1, rows, capacity), -np.inf, np.float32)
        self._chain = np.where(np.tri(rows, dtype=bool), 0.0, -np.inf).astype(np.float32)
        self._num_seen: int | None = 0  # cached tokens that all rows see; None: unknown

    def show(self, start: int, sees: np.ndarray | None) -> np.ndarray:
        """Return the mask for `start` cached tokens and the rows' `sees`, [rows, rows] bool, None
        for a chain."""
        columns = self.bias[0, 0]
        rows = len(columns)
        seen, self._num_seen = self._num_seen, None  # unknown if interrupted
        if seen is None:
            seen = 0
            columns[:] = -np.inf
        kept = min(start, seen)
        columns[:, kept : seen + rows] = -np.inf
        columns[:, kept:start] = 0.0
        own = self._chain if sees is None else np.where(sees, 0.0, -np.inf)
        columns[:, start : start + rows] = own
        self._num_seen = start
        return self.bias
