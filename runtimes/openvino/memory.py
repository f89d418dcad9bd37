"""Forecasts the memory of a bundle in OpenVINO, from its manifest alone.

Measured with OpenVINO 2026.4 on x86-64: the CPU plugin copies every matrix when it compiles, and
once more in its kernel's own order at the first pass, while the original stays mapped. For the demo
model and for one of 1B this says 586 MB and 2.6 GB with 1000 tokens; 680 MB and 2.4 GB were found.
What a GPU's own memory will hold was not measured on one: it is added up from what is copied there.
"""

from __future__ import annotations

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.devices import CPU
from edge_spec.fitting.memory import Memory, context_tokens
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import room_read_whole
from edge_spec.runtimes.openvino.session import MAX_ROWS, PREFILL_ROWS

DATA_FILE = "model.onnx.data"
LIBRARY_BYTES = 90_000_000  # code and tables, once they are in use
_LAYER_BYTES = 2_000_000  # its nodes, compiled
_FLOAT = 4
_SCORE_BUFFERS = 4  # scores of a prefill, before and after the softmax and its slices


def bundle_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Raises BundleError where the bundle has no weights."""
    config = bundle.config
    length, used = context_tokens(config.context_length, options, num_tokens)
    slots = room_read_whole(used, length)
    stored = bundle.file(DATA_FILE).stat().st_size
    token = 2 * config.num_layers * config.kv_size * _FLOAT
    graph = _LAYER_BYTES * config.num_layers
    inner = 4 * config.intermediate_size + 4 * config.hidden_size
    rows = PREFILL_ROWS * (inner + config.query_size + 2 * config.kv_size) * _FLOAT
    scores = _SCORE_BUFFERS * PREFILL_ROWS * config.num_heads * (slots + PREFILL_ROWS) * _FLOAT
    answers = MAX_ROWS * (config.vocab_size + config.hidden_size) * _FLOAT
    cache, work = token * slots, rows + scores + answers + token * PREFILL_ROWS
    device = options.providers[0].lower() if options.providers else CPU
    if device == CPU:
        return Memory(3 * stored + graph, cache, work, LIBRARY_BYTES, mapped_twice=stored)
    return Memory(
        stored, cache, answers, LIBRARY_BYTES, stored, {device: stored + graph + cache + work}
    )
