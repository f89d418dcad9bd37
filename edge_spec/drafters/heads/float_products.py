"""Products with a head's matrices in float32, by numpy: what graphs are compared with, and what
computes where onnxruntime is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np

from edge_spec.core.heads import HeadMatrix
from edge_spec.drafters.heads.blas_threads import one_blas_thread

_FEW_ROWS = 64


class FloatProducts:
    """Keeps all matrices in float32. Between a target's passes, which have few rows, one thread
    computes them: numpy's others would wait for the target's, which still hold the cores."""

    def __init__(self, matrices: Mapping[str, HeadMatrix]) -> None:
        self._weights = {name: _whole(matrix).T for name, matrix in matrices.items()}
        self._biases = {name: matrix.bias for name, matrix in matrices.items()}

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        """x: [rows, in] float32 -> [rows, out] float32, the bias added."""
        bias = self._biases[name]
        with one_blas_thread() if len(x) <= _FEW_ROWS else nullcontext():
            product: np.ndarray = x @ self._weights[name]
        return product if bias is None else product + bias


def _whole(matrix: HeadMatrix) -> np.ndarray:
    parts = [read() for read in matrix.parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
