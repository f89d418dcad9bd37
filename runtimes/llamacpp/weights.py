"""Loaded weights and the contexts opened on them."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.errors import DeviceMemoryError, ModelFileError, SessionError, UnsupportedModelError
from edge_spec.models.devices import return_freed
from edge_spec.runtimes.llamacpp.library import (
    NAME,
    NO_REASON,
    ContextChoices,
    Library,
    LibraryDevice,
    ModelChoices,
    cache_bytes,
)

# Hybrids that return final states besides logits. LFM2's graph takes this switch for its embedding
# model and computes other logits.
_HYBRIDS_WITH_STATES = frozenset({"qwen35", "qwen35moe"})
_OUT_OF_MEMORY = re.compile(r"alloc|memory", re.IGNORECASE)


class GgufWeights:
    """Loaded weights, freed by `close`, on collection or at exit."""

    def __init__(
        self, library: Library, path: Path, config: ModelConfig, how: ModelChoices
    ) -> None:
        self.library = library
        self._path = path
        self.config = config
        self._devices = how.devices
        self._num_cached = how.num_cached
        known = library.log.num_errors
        handle = library.load_model(os.fsencode(path), how)
        if handle is None:
            raise self._refusal(library.log.errors_after(known))
        self._handle = handle
        self._free = weakref.finalize(self, library.llama_model_free, handle)
        self._contexts: list[weakref.finalize[..., Any]] = []
        self._lock = Lock()  # threads may open contexts concurrently
        self.vocab_size = library.vocab_size(handle)
        self.hidden_size = library.llama_model_n_embd(handle)
        self.known_streams: set[int] = set()  # layers whose inputs the library is known to return
        self.state_window = library.llama_model_n_swa(handle)
        self.is_hybrid = library.llama_model_is_hybrid(handle)
        self.gives_final_states = not self.is_hybrid or config.architecture in _HYBRIDS_WITH_STATES
        if self.vocab_size != config.vocab_size:
            self.close()
            raise ModelFileError(
                f"{path}: {NAME} reads {self.vocab_size} tokens, expected {config.vocab_size}",
                remedy="Convert the model again.",
            )

    def close(self) -> None:
        """Free the contexts, which read these weights, then the weights."""
        for free_context in self._contexts:
            free_context()
        self._free()

    def open_context(
        self, owner: object, choices: ContextChoices
    ) -> tuple[int, weakref.finalize[..., Any]]:
        """Return a context and what frees it, at the latest with its owner or at exit. Raises
        SessionError, DeviceMemoryError if its cache does not fit."""
        needed = cache_bytes(self.config, choices.num_tokens, choices.kv_type)
        if choices.on_device:
            moved = min(self._num_cached, self.config.num_layers)
            needed = needed * moved // self.config.num_layers
        devices = self._used_devices(choices.on_device)
        what = f"a cache of {choices.num_tokens} tokens"
        free_bytes = sum(device.free_bytes for device in devices)
        if free_bytes and needed > free_bytes:
            raise _too_little(devices, needed, what)
        log = self.library.log
        known = log.num_errors
        handle = self.library.open_context(self._handle, choices)
        if handle is not None:
            free = weakref.finalize(owner, _free, self.library.llama_free, handle)
            with self._lock:
                self._contexts = [each for each in self._contexts if each.alive] + [free]
            return handle, free
        errors = log.errors_after(known)
        if _OUT_OF_MEMORY.search(errors):
            raise _too_little(devices, needed, what)
        raise SessionError(
            f"{NAME} cannot open a context of {choices.num_tokens} tokens: {errors or NO_REASON}",
            remedy="Try --no-flash-attention, another --kv-type or a shorter --context.",
        )

    def _refusal(self, errors: str) -> Exception:
        if _OUT_OF_MEMORY.search(errors):
            needed = self._path.stat().st_size
            devices = self._used_devices(bool(self._devices))
            return _too_little(devices, needed, f"the weights of {self._path}")
        return UnsupportedModelError(
            f"{NAME} cannot load {self._path}: {errors or NO_REASON}",
            remedy="Update the library, or convert the model again.",
        )

    def _used_devices(self, on_device: bool) -> list[LibraryDevice]:
        """Return the devices with memory free now."""
        names = {device.name for device in self._devices}
        servers = {device.server for device in self._devices if device.server}
        return [
            device
            for device in self.library.devices(*servers)
            if (device.name in names if on_device else device.is_cpu)
        ]


def _too_little(devices: Sequence[LibraryDevice], needed: int, what: str) -> DeviceMemoryError:
    free_bytes = sum(device.free_bytes for device in devices)
    return DeviceMemoryError(
        f"{' and '.join(device.name for device in devices)} has too little memory for {what}: "
        f"{needed / 1e6:,.0f} MB needed, {free_bytes / 1e6:,.0f} MB free",
        remedy="Give a shorter --context, a smaller quantization, fewer --gpu-layers or another "
        "--device.",
    )


def _free(free_context: Callable[[int], None], handle: int) -> None:
    """Free a context and return its memory to the system: forks and growing texts open many, and
    allocations in between keep the heap from shrinking."""
    free_context(handle)
    return_freed()
