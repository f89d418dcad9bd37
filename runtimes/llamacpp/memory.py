"""Forecasts a GGUF file's memory and chooses how many layers leave the CPU.

Measured with llama-cpp-python 0.3.36 on x86-64 with AVX-512: loading touches the whole mapped file
and copies matrices of REPACKED types; our kernels release the file. llama.cpp counts the head as
one more layer, offloads from there down, and splits by free memory (llama-model.cpp, load_tensors).
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import DeviceMemoryError
from edge_spec.models.devices import PLANNED_TOKENS, Memory, context_tokens
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.cache import FIRST_TOKENS
from edge_spec.runtimes.llamacpp.library import (
    PREFILL_TOKENS,
    LibraryDevice,
    Offload,
    cache_bytes,
)

# Repacked for AVX2 and NEON; only Q4_0 was measured.
REPACKED = frozenset({"Q4_0", "Q4_K", "IQ4_NL"})
_EMBEDDING = "model.embed_tokens.weight"
_CELLS = 256  # cache sizes are a multiple of it
_VOCABULARY = 7  # times bytes outside tensors, mostly texts and merges
_SCORED_ROWS = 16  # few passes are wider, though there is room for MAX_ROWS
_FLOAT = 4  # bytes
_MASK = 2
_LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")  # in a tensor's name
_LIBRARY_BYTES, _CONTEXT_BYTES = 6_000_000, 2_000_000


@dataclass(frozen=True)
class Parts:
    """Bytes that devices can take. layers: weights of each, with a multi-token prediction layer;
    cache: per layer; head: all other weights; work: per device, for the widest passes."""

    layers: tuple[int, ...]
    cache: int
    head: int
    work: int


def model_parts(source: ModelInfo, options: RuntimeOptions, num_tokens: int | None) -> Parts:
    """Raises KeyError for an unknown KV type."""
    config = source.config
    cells = _cells(config, options, num_tokens)
    found: Counter[int | None] = Counter()
    for name, tensor in _tensors(source).items():
        layer = _LAYER.search(name)
        if name != _EMBEDDING or config.tied_embeddings:  # a tied embedding is copied as the head
            found[int(layer[1]) if layer else None] += tensor.data.nbytes
    counted = config.num_layers + (config.num_layers in found)
    return Parts(
        tuple(found[layer] for layer in range(counted)),
        cache_bytes(config, cells, options.kv_type) // config.num_layers,
        found[None],
        _work(config, cells, MAX_ROWS),
    )


def gguf_memory(
    source: ModelInfo,
    options: RuntimeOptions,
    num_tokens: int | None,
    offload: Offload | None = None,
    *,
    repacks: bool = True,
) -> Memory:
    """Forecast the memory. offload: the devices' part; repacks: whether the library's kernels
    compute, which copy REPACKED matrices. Raises KeyError for an unknown KV type."""
    cells, config = _cells(source.config, options, num_tokens), source.config
    tensors, file_bytes, copied = _tensors(source), source.path.stat().st_size, 0
    vocabulary = _VOCABULARY * (file_bytes - sum(each.data.nbytes for each in tensors.values()))
    if repacks and options.mmap is not False:
        copied = sum(
            tensor.data.nbytes
            for name, tensor in tensors.items()
            if tensor.kind.name in REPACKED and name != _EMBEDDING
        )
    cache = cache_bytes(config, cells, options.kv_type)
    if offload is not None and offload.num_layers:
        parts = model_parts(source, options, num_tokens)
        kept = len(parts.layers) - offload.num_cached
        copied = copied * kept // len(parts.layers)
        file_bytes -= sum(parts.layers[kept:]) + (0 if config.tied_embeddings else parts.head)
        cache = parts.cache * kept
    return Memory(
        weights=file_bytes + copied + max(0, vocabulary),
        cache=cache,
        work=_work(config, cells) + _CONTEXT_BYTES,
        library=_LIBRARY_BYTES,
        mapped_twice=copied,
        on_devices=offload.by_device if offload else {},
    )


def _cells(config: ModelConfig, options: RuntimeOptions, num_tokens: int | None) -> int:
    """Return the cache's cells, which double from FIRST_TOKENS."""
    length, used = context_tokens(config.context_length, options, num_tokens)
    cells = min(FIRST_TOKENS, length)
    while cells < used:
        cells = min(2 * cells, length)
    return -(-cells // _CELLS) * _CELLS


def _tensors(source: ModelInfo) -> Mapping[str, Any]:
    tensors: Mapping[str, Any] = source.tensors  # type: ignore[attr-defined]
    return tensors


def _work(config: ModelConfig, cells: int, scored_rows: int = _SCORED_ROWS) -> int:
    """Return bytes of narrow passes' scores and a prefill's activations and mask."""
    scores = scored_rows * (config.vocab_size + config.hidden_size)
    rows = min(PREFILL_TOKENS, cells)
    activations = rows * (2 * config.hidden_size + 3 * config.intermediate_size)
    return _FLOAT * (scores + activations) + _MASK * rows * cells


_USED = 0.9  # of free memory; buffers and rounding take the rest

_log = logging.getLogger(__name__)


def offload(
    source: ModelInfo,
    options: RuntimeOptions,
    devices: Sequence[LibraryDevice],
    num_tokens: int | None = None,
) -> Offload:
    """Return the part that devices get: the layers asked for, else as many as fit, or all if free
    memory is unknown. num_tokens: to count bytes for; None: PLANNED_TOKENS."""
    limit = min(source.config.context_length, options.context_length or PLANNED_TOKENS)
    planned = model_parts(source, options, limit)
    most = len(planned.layers) + 1
    num_layers = options.gpu_layers
    if num_layers is None:
        fitting = (count for count in range(most, 0, -1) if _fits(planned, count, devices))
        num_layers = next(fitting, 0) if all(each.free_bytes for each in devices) else most
    num_layers = min(num_layers, most)
    parts = planned if num_tokens is None else model_parts(source, options, num_tokens)
    num_cached = max(0, num_layers - 1)
    return Offload(num_layers, most, num_cached, _by_device(parts, num_layers, devices))


def fitted(
    source: ModelInfo, options: RuntimeOptions, devices: Sequence[LibraryDevice]
) -> Offload | None:
    """Return the part to offload, and warn unless it is all; None: the CPU keeps all. Raises
    DeviceMemoryError if no layer fits a named device."""
    if not devices or options.gpu_layers == 0:
        return None
    found = offload(source, options, devices)
    if options.gpu_layers is not None or found.num_layers == found.most:
        return found
    names = " and ".join(each.name.lower() for each in devices)
    if found.num_layers == 0 and options.providers:
        free = sum(each.free_bytes for each in devices) / 1e6
        needed = sum(offload(source, replace(options, gpu_layers=1), devices).by_device.values())
        raise DeviceMemoryError(
            f"{names} has too little memory for any layer of {source.path}: {needed / 1e6:,.0f} MB "
            f"needed, {free:,.0f} MB free",
            remedy="Give a shorter --context, a smaller quantization or --device cpu.",
        )
    _log.warning(
        "%s has room for %d of %d layers of %s: the CPU has the others; a shorter --context or a "
        "smaller quantization leaves it fewer",
        names,
        found.num_layers,
        found.most,
        source.path.name,
    )
    return found if found.num_layers else None


def _fits(parts: Parts, count: int, devices: Sequence[LibraryDevice]) -> bool:
    needed = _by_device(parts, count, devices)
    return all(needed.get(each.name.lower(), 0) <= _USED * each.free_bytes for each in devices)


def _by_device(parts: Parts, count: int, devices: Sequence[LibraryDevice]) -> dict[str, int]:
    """Return each device's bytes of the head, the last `count` - 1 layers and buffers."""
    shares = list(accumulate(each.free_bytes or 1 for each in devices))
    sizes = [layer + parts.cache for layer in parts.layers] + [parts.head]
    found: Counter[str] = Counter()
    for i, size in enumerate(sizes[len(sizes) - count :] if devices else []):
        device = devices[bisect_right(shares, i / count * shares[-1])]
        found[device.name.lower()] += size
    return {name: size + parts.work for name, size in found.items()}
