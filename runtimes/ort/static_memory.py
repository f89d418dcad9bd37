"""What a static bundle will take in onnxruntime, from its manifest alone.

Measured with onnxruntime 1.32 on x86-64, with all four functions of the demo model in use: each
has the layers' matrices in the order of its kernels, blocks of integers once and a half as large as
they are stored and all others as float32, and each that scores has a head of float32.
"""

from __future__ import annotations

import re

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.memory import Memory, context_tokens
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort.memory import LIBRARY_BYTES, layer_weights

_FLOAT, _HALF = 4, 2  # bytes
_COPIED = 1.5  # of a matrix of integers
_BLOCK_SCALE_BITS = 1  # of a weight: 32 of a block share 32
_PADDING_SLOTS = 64  # at most, beside the context


def static_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecasts the same for any number of tokens: a session has all of its slots at once."""
    config = bundle.config
    length, _ = context_tokens(config.context_length, options, num_tokens)
    graphs = [name for name in bundle.manifest.files if name.endswith(".onnx")]
    num_scoring = sum(not name.startswith("prefill") for name in graphs)
    matrices = layer_weights(config)
    embedding = config.vocab_size * config.hidden_size
    copies = len(graphs) * matrices * _matrix_bytes(bundle) + num_scoring * embedding * _FLOAT
    stored = sum(entry.num_bytes for entry in bundle.manifest.files.values())
    element = _FLOAT if bundle.manifest.quantization == "fp32" else _HALF
    slots = config.context_length + _PADDING_SLOTS
    state = 2 * config.num_layers * config.kv_size * slots * element
    scores = _FLOAT * config.num_heads * _PADDING_SLOTS * (length + _PADDING_SLOTS)
    if bundle.manifest.compiled is not None:  # one binary, which the NPU maps as it is stored
        copies = 0
    return Memory(weights=stored + int(copies), cache=state, work=scores, library=LIBRARY_BYTES)


def _matrix_bytes(bundle: Bundle) -> float:
    """Of a weight of a layer, in one function."""
    bits = re.match(r"int(\d+) block", bundle.manifest.quantization)
    return _FLOAT if bits is None else _COPIED * (int(bits[1]) + _BLOCK_SCALE_BITS) / 8
