"""Makes the mask of a stacked pass (exporters/onnx/attention.py), over the whole cache."""

from __future__ import annotations

import numpy as np
import onnxruntime

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
