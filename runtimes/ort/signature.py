"""Reads what graphs of different forms (graph_forms.py) take and give, and binds buffers to it;
makes the mask of a stacked pass (exporters/onnx/attention.py), over the whole cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from edge_spec.core.model import Forward
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, SessionError
from edge_spec.runtimes.kv_cache import KvCache

_PAST = "past."  # begins the names of caches
_ELEMENTS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class Signature:
    cache: np.dtype[Any]  # of keys and values
    logits: np.dtype[Any]
    hidden: np.dtype[Any]
    bias: np.dtype[Any] | None  # of `attention_bias`; None: chains alone
    is_attended_once: bool  # attention takes the rows of a pass as they are

    @classmethod
    def of(cls, inference: onnxruntime.InferenceSession) -> Signature:
        """Reads a graph with caches. Raises KeyError for types that no form has."""
        taken = {value.name: value.type for value in inference.get_inputs()}
        given = {value.name: value.type for value in inference.get_outputs()}
        bias = taken.get("attention_bias")
        return cls(
            cache=_element(next(kind for name, kind in taken.items() if name.startswith(_PAST))),
            logits=_element(given["logits"]),
            hidden=_element(given["hidden"]),
            bias=None if bias is None else _element(bias),
            is_attended_once="attention_rows" not in taken,
        )


def widened(logits: np.ndarray, hidden: np.ndarray) -> Forward:
    """Returns the scores of a pass in float32, float32 ones as they are.

    Raises SessionError for float16 scores or states that are no numbers: then something in the pass
    was larger than float16 holds, and nothing that was made of it means anything."""
    if logits.dtype == np.float32:
        return Forward(logits, hidden)
    found = Forward(logits.astype(np.float32), hidden.astype(np.float32, copy=False))
    for values in (found.logits, found.hidden):
        assert values is not None
        with np.errstate(invalid="ignore"):  # infinities of both signs
            sums = values.sum(axis=-1)  # no numbers where any value is none
        if not np.isfinite(sums).all():
            raise SessionError(
                "float16 cannot hold what this model computes: its scores are no numbers",
                remedy="Choose --device cpu, which computes in float32.",
            )
    return found


def _element(kind: str) -> np.dtype[Any]:
    return np.dtype(_ELEMENTS[kind])


def bind_output(binding: onnxruntime.IOBinding, name: str, buffer: np.ndarray) -> None:
    binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))


def bind_cache(cache: KvCache, binding: onnxruntime.IOBinding, suffix: str = "") -> None:
    """Binds each buffer as both past and present. suffix: of the names."""
    for name, buffer in cache.buffers():
        shared = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
        binding.bind_ortvalue_input(f"past.{name}{suffix}", shared)
        binding.bind_ortvalue_output(f"present.{name}{suffix}", shared)


# As onnxruntime's arena, the C++ library, and CUDA say it.
_OUT_OF_MEMORY = re.compile(r"failed to allocate|bad_?alloc|out of memory", re.IGNORECASE)


def pass_error(error: Exception, rows: int, start: int) -> EdgeSpecError:
    """Returns the error of a pass over `rows` rows after `start` tokens that failed."""
    what = f"onnxruntime failed on {rows} rows at {start} tokens: {error}"
    if _OUT_OF_MEMORY.search(str(error)):
        remedy = "Give a shorter --context, or another --device."
        return DeviceMemoryError(what, remedy=remedy)
    remedy = "Try fewer rows (--draft-n-max) or another --device."
    return SessionError(what, remedy=remedy)


STACKED = "stacked"  # the input that tells a graph with both forms of attention


def takes_form(inference: onnxruntime.InferenceSession) -> bool:
    """Returns whether the graph has both forms, and takes an input that chooses one."""
    return STACKED in {value.name for value in inference.get_inputs()}


def has_stacked(inference: onnxruntime.InferenceSession) -> bool:
    """Returns whether passes of few rows are stacked: on the CPU alone, since providers of other
    devices know the operator."""
    return takes_form(inference) and inference.get_providers() == ["CPUExecutionProvider"]


class StackedMask:
    """Bound once for passes of one width: what changes from one pass to the next is little."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.bias = np.full((1, 1, rows, capacity), -np.inf, np.float32)
        self._chain = np.where(np.tri(rows, dtype=bool), 0.0, -np.inf).astype(np.float32)
        self._num_seen: int | None = 0  # cached tokens that all rows see; None: not known

    def show(self, start: int, sees: np.ndarray | None) -> None:
        """Shows `start` cached tokens, and of the rows what `sees` says, [rows, rows] bool, or a
        chain's."""
        columns = self.bias[0, 0]
        rows = len(columns)
        seen, self._num_seen = self._num_seen, None  # an interrupt leaves any of the steps undone
        if seen is None:
            seen = 0
            columns[:] = -np.inf
        kept = min(start, seen)
        columns[:, kept : seen + rows] = -np.inf
        columns[:, kept:start] = 0.0
        own = self._chain if sees is None else np.where(sees, 0.0, -np.inf)
        columns[:, start : start + rows] = own
        self._num_seen = start
