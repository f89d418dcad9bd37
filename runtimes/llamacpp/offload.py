"""Chooses how many layers leave the CPU, and counts what they take of each device's memory.

llama.cpp counts the head as the layer after the last one and offloads from there down; several
devices share what is offloaded by their free memory (llama-model.cpp, load_tensors).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import DeviceMemoryError
from edge_spec.fitting.devices import PLANNED_TOKENS
from edge_spec.runtimes.llamacpp.library import LibraryDevice, Offload
from edge_spec.runtimes.llamacpp.memory import Parts, model_parts

_USED = 0.9  # of what is free: buffers of kernels and the rounding of sizes take the rest

_log = logging.getLogger(__name__)


def offload(
    source: ModelInfo,
    options: RuntimeOptions,
    devices: Sequence[LibraryDevice],
    num_tokens: int | None = None,
) -> Offload:
    """Returns how much of a model these devices get: the layers that were asked for, or as many as
    fit what is free; all where that is not known. num_tokens: of context in use, that the bytes
    are counted with; None: PLANNED_TOKENS, as for the number of layers.
    """
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
    """Returns what of a model is offloaded, and says so where that is not all of it and nobody
    asked for it; None where all stays on the CPU.

    Raises DeviceMemoryError where a device was named and nothing fits it.
    """
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
    """Bytes of the head and the last `count` - 1 layers, with the buffers of each used device."""
    shares = list(accumulate(each.free_bytes or 1 for each in devices))
    sizes = [layer + parts.cache for layer in parts.layers] + [parts.head]
    found: Counter[str] = Counter()
    for i, size in enumerate(sizes[len(sizes) - count :] if devices else []):
        device = devices[bisect_right(shares, i / count * shares[-1])]
        found[device.name.lower()] += size
    return {name: size + parts.work for name, size in found.items()}
