"""Loaded weights: their handle, and the contexts that are opened on them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from pathlib import Path

from edge_spec.architecture import ModelConfig
from edge_spec.errors import DeviceMemoryError, ModelFileError, SessionError, UnsupportedModelError
from edge_spec.runtimes.llamacpp.library import (
    KV_TYPES,
    ContextChoices,
    Device,
    Library,
    ModelChoices,
)

_OUT_OF_MEMORY = re.compile(r"alloc|memory", re.IGNORECASE)


class Weights:
    """Freed by `close`, when collected, or at the interpreter's exit."""

    def __init__(
        self, library: Library, path: Path, config: ModelConfig, how: ModelChoices
    ) -> None:
        self.library = library
        self._path = path
        self._config = config
        self._devices = how.devices
        handle, errors = self._load(how)
        if handle is None:
            raise self._refusal(errors)
        self._handle = handle
        self._free = weakref.finalize(self, library.free_model, handle)
        self.vocab_size = library.vocab_size(handle)
        self.hidden_size = library.hidden_size(handle)
        if self.vocab_size != config.vocab_size:
            self.close()
            raise ModelFileError(
                f"{path}: {library.name} reads {self.vocab_size} tokens, expected "
                f"{config.vocab_size}",
                remedy="Convert the model again.",
            )

    def close(self) -> None:
        self._free()

    def open_context(self, choices: ContextChoices) -> int:
        """Raises DeviceMemoryError where there is too little memory for its cache."""
        needed = self.cache_bytes(choices)
        device = self._memory_of_cache(choices)
        if device.free_bytes and needed > device.free_bytes:
            raise _too_little(device, needed, f"a cache of {choices.num_tokens} tokens")
        with self.library.log.errors() as errors:
            context = self.library.open_context(self._handle, choices)
        if context is not None:
            return context
        if _OUT_OF_MEMORY.search(" ".join(errors)):
            raise _too_little(device, needed, f"a cache of {choices.num_tokens} tokens")
        raise SessionError(
            f"{self.library.name} cannot open a context of {choices.num_tokens} tokens: "
            f"{_last(errors)}",
            remedy="Try --no-flash-attention, another --kv-type or a shorter --context.",
        )

    def cache_bytes(self, choices: ContextChoices) -> int:
        """Of keys and values."""
        _, item_bytes = KV_TYPES[choices.kv_type]
        items = 2 * self._config.num_layers * self._config.kv_size * choices.num_tokens
        return int(items * item_bytes)

    def _load(self, how: ModelChoices) -> tuple[int | None, Sequence[str]]:
        with self.library.log.errors() as errors:
            return self.library.load_model(str(self._path).encode(), how), list(errors)

    def _refusal(self, errors: Sequence[str]) -> Exception:
        if _OUT_OF_MEMORY.search(" ".join(errors)):
            needed = self._path.stat().st_size
            return _too_little(self._largest_device(), needed, f"the weights of {self._path}")
        return UnsupportedModelError(
            f"{self.library.name} cannot load {self._path}: {_last(errors)}",
            remedy="Update the library, or convert the model again.",
        )

    def _memory_of_cache(self, choices: ContextChoices) -> Device:
        return self._largest_device() if choices.on_device else self._cpu()

    def _largest_device(self) -> Device:
        """Of those in use, with the memory that is free now."""
        names = {device.name for device in self._devices}
        used = [device for device in self.library.devices() if device.name in names]
        return max(used, key=lambda device: device.free_bytes, default=self._cpu())

    def _cpu(self) -> Device:
        return next(device for device in self.library.devices() if device.is_cpu)


def _too_little(device: Device, needed: int, what: str) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{device.name} has too little memory for {what}: {needed / 1e6:,.0f} MB needed, "
        f"{device.free_bytes / 1e6:,.0f} MB free",
        remedy="Give a shorter --context, a smaller quantization, fewer --gpu-layers or another "
        "--device.",
    )


def _last(errors: Sequence[str]) -> str:
    return errors[-1] if errors else "it gives no reason"
