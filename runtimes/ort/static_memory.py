"""Forecasts the memory of a static bundle in onnxruntime, from its manifest alone.

Measured with onnxruntime 1.32 on x86-64, with all four functions of the demo model in use: each
has the layers' matrices in the order of its kernels, blocks of integers once and a half as large as
they are stored and all others as float32, and each that scores has a head of float32.
"""

from __future__ import annotations

import re

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.memory import Memory
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort.memory import LIBRARY_BYTES, layer_weights
from edge_spec.runtimes.static.memory import FLOAT, session_bytes

_COPIED = 1.5  # of a matrix of integers
_BLOCK_SCALE_BITS = 1  # of a weight: 32 of a block share 32


def static_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecasts the same for any number of tokens: a session has all of its slots at once."""
    config = bundle.config
    states, scores = session_bytes(bundle, options, num_tokens)
    weights = sum(entry.num_bytes for entry in bundle.manifest.files.values())
    if bundle.manifest.compiled is None:  # else one binary, which the NPU maps as it is stored
        graphs = [name for name in bundle.manifest.files if name.endswith(".onnx")]
        num_scoring = sum(not name.startswith("prefill") for name in graphs)
        embedding = config.vocab_size * config.hidden_size * FLOAT
        matrices = layer_weights(config) * _matrix_bytes(bundle)
        weights += int(len(graphs) * matrices) + num_scoring * embedding
    return Memory(weights=weights, cache=states, work=scores, library=LIBRARY_BYTES)


def _matrix_bytes(bundle: Bundle) -> float:
    """Returns the bytes of one weight of a layer's matrices, in one function."""
    bits = re.match(r"int(\d+) block", bundle.manifest.quantization)
    return FLOAT if bits is None else _COPIED * (int(bits[1]) + _BLOCK_SCALE_BITS) / 8
