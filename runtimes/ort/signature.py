"""Reads what graphs of different forms (graph_forms.py) take and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.errors import SessionError

if TYPE_CHECKING:
    import onnxruntime

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

    @property
    def is_half(self) -> bool:
        return self.cache == np.float16


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
