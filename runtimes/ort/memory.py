"""Forecasts a bundle's memory in onnxruntime from its manifest.

Measured with onnxruntime 1.31 and 1.32 on x86-64: integer matrices are repacked and their originals
unmapped; scales and zero points stay mapped, with copies of scales and block sums. Our kernels take
a little less. A tied embedding stays beside the head's copy. Float16 becomes float32, except
embeddings. Before a model moves to a GPU it is opened here, too; what it takes there is unknown.
"""

from __future__ import annotations

import re

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import Memory, context_tokens
from edge_spec.runtimes.kv_cache import GROWTH_TOKENS, PREFILL_ROWS
from edge_spec.runtimes.static.session import session_bytes

DATA_FILE = "model.onnx.data"
LIBRARY_BYTES = 30_000_000  # code and tables in use
_BLOCK_COPY_BYTES = 8  # a block's scale and sum
_LAYER_BYTES = 95_000  # nodes of the graph
_EMBEDDING_BLOCK = 32
_FLOAT = 4  # bytes
_DECODED_ROWS = 15  # buffers for widths 1 to 5
_SCORE_BUFFERS, _ROUND_ROWS = 3, 16
_ARENA = 2  # it grows in powers of two
# Copies of integer matrices in each function of a static bundle; other matrices, and each scoring
# function's head, are float32. Measured with the demo model's four functions.
_COPIED = 1.5
_BLOCK_SCALE_BITS = 1  # per weight: blocks of 32 share 32


def bundle_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Raises BundleError for a bundle without weights."""
    config, kind = bundle.config, bundle.manifest.kv_cache
    length, used = context_tokens(config.context_length, options, num_tokens)
    is_growing = kind == "growing"
    steps = -(-used // GROWTH_TOKENS)
    capacity = min(steps * GROWTH_TOKENS, length + (0 if is_growing else 1))
    cache = config.cached_elements * capacity * _FLOAT
    if is_growing:
        # Matrices are repacked like ours. Of an embedding only used rows are read, but which tensor
        # it is is unknown: the demo model as int4 is forecast at 408 MB and takes 267.
        heads = 2 * config.query_size + PREFILL_ROWS * config.num_heads  # one layer at a time
        work = _FLOAT * _ARENA * (heads * capacity + PREFILL_ROWS * config.vocab_size)
        return Memory(bundle.num_bytes, 2 * cache, work, LIBRARY_BYTES)  # past and present
    work = _work(config, capacity)
    if kind == "whole":  # all heads' scores in a round of many rows
        work += _FLOAT * _SCORE_BUFFERS * _ROUND_ROWS * config.num_heads * capacity
    return Memory(_weights(bundle, config), cache, work, LIBRARY_BYTES)


def _weights(bundle: Bundle, config: ModelConfig) -> int:
    embedding = config.vocab_size * config.hidden_size
    matrices = config.num_parameters - embedding * (1 if config.tied_embeddings else 2)
    if config.layer_embeddings is not None:  # looked up in place
        table = config.vocab_size * config.num_layers * config.layer_embeddings.size
        matrices -= table
    graph = _LAYER_BYTES * config.num_layers
    quantization = bundle.manifest.quantization
    block = re.search(r"block (\d+)", quantization)
    if block is None:
        stored = 2 if quantization == "fp16" else _FLOAT
        return matrices * _FLOAT + embedding * (_FLOAT + stored) + graph
    blocks = matrices // int(block[1]) + embedding // _EMBEDDING_BLOCK
    copied = embedding if config.tied_embeddings else 0
    return bundle.file(DATA_FILE).stat().st_size + copied + blocks * _BLOCK_COPY_BYTES + graph


def layer_weights(config: ModelConfig) -> int:
    attention = 2 * config.query_size + 2 * config.kv_size
    layers = range(config.num_layers)
    inner = sum(map(config.inner_total, layers))
    return config.hidden_size * (attention * config.num_layers + 3 * inner)


def _work(config: ModelConfig, capacity: int) -> int:
    """Return bytes of a prefill's activations and three masks, and narrow passes' scores."""
    layers = range(config.num_layers)
    inner = 4 * max(map(config.inner_largest, layers)) + 4 * config.hidden_size
    heads = max((config.heads(layer) for layer in config.attending), key=lambda each: each.head_dim)
    activations = PREFILL_ROWS * (inner + heads.query_size + 2 * heads.kv_size)
    if config.layer_embeddings is not None:
        activations += PREFILL_ROWS * 2 * config.num_layers * config.layer_embeddings.size
    masks = 3 * PREFILL_ROWS * capacity
    scores = _DECODED_ROWS * (config.vocab_size + config.hidden_size)
    return _FLOAT * (_ARENA * activations + masks + scores)


def static_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecast a static bundle, whose sessions have all slots at once."""
    config, manifest = bundle.config, bundle.manifest
    states, scores = session_bytes(bundle, options, num_tokens)
    weights = sum(entry.num_bytes for entry in manifest.files.values())
    if manifest.compiled is None:  # else the NPU maps one binary
        graphs = [name for name in manifest.files if name.endswith(".onnx")]
        num_scoring = sum(not name.startswith("prefill") for name in graphs)
        bits = re.match(r"int(\d+) block", manifest.quantization)
        each = _FLOAT if bits is None else _COPIED * (int(bits[1]) + _BLOCK_SCALE_BITS) / 8
        weights += int(len(graphs) * layer_weights(config) * each)
        weights += num_scoring * config.vocab_size * config.hidden_size * _FLOAT
    return Memory(weights, states, scores, LIBRARY_BYTES)
