"""Binds buffers of numpy to a pass."""

from __future__ import annotations

import numpy as np
import onnxruntime

from edge_spec.runtimes.kv_cache import KvCache


def bind_output(binding: onnxruntime.IOBinding, name: str, buffer: np.ndarray) -> None:
    binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffer))


def bind_cache(cache: KvCache, binding: onnxruntime.IOBinding, suffix: str = "") -> None:
    """Binds each buffer as both past and present. suffix: of the names."""
    for name, buffer in cache.buffers():
        shared = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
        binding.bind_ortvalue_input(f"past.{name}{suffix}", shared)
        binding.bind_ortvalue_output(f"present.{name}{suffix}", shared)
