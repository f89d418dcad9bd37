"""Buffers of numpy as outputs of a pass."""

from __future__ import annotations

import numpy as np
import onnxruntime


def bind_output(binding: onnxruntime.IOBinding, name: str, buffer: np.ndarray) -> None:
    binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))
