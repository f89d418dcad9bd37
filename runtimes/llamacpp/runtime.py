"""Runs GGUF files with llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.core.model_info import ModelInfo, is_plain
from edge_spec.errors import MissingDependencyError, UnsupportedModelError, UsageError
from edge_spec.runtimes.llamacpp import upstream
from edge_spec.runtimes.llamacpp.devices import choose_devices, listed, wanted_devices
from edge_spec.runtimes.llamacpp.library import (
    NAME,
    NO_REASON,
    VOCABULARY_ONLY,
    Library,
    LibraryDevice,
)
from edge_spec.runtimes.llamacpp.memory import (
    gguf_memory,
    offload,
)
from edge_spec.runtimes.llamacpp.model import LlamaCppModel
from edge_spec.runtimes.llamacpp.rows.install import wanted
from edge_spec.runtimes.llamacpp.tokenizer import LibraryTokenizer

if TYPE_CHECKING:
    from edge_spec.models import devices as placement
    from edge_spec.models.devices import Memory

_UNKNOWN_ARCHITECTURE = "unknown model architecture"  # the library's wording


class LlamaCppRuntime(Runtime):
    name = "llamacpp"
    reads = "gguf"
    _library: Callable[[], Library] = staticmethod(upstream.library)
    _screened: ModelInfo | None = None  # the last runnable one

    def kernels(self) -> str:
        """See `edge_spec.core.model.Runtime`. llama.cpp's build, part of the same keys, decides if
        they fit."""
        return wanted()

    @property
    def opens_beside(self) -> bool:
        """See `edge_spec.core.model.Runtime`: our kernels filter llama.cpp's log in C."""
        return bool(wanted())

    def open(self, source: ModelInfo, options: RuntimeOptions) -> LlamaCppModel:
        """Raises MissingDependencyError, DeviceError, UsageError for an unknown device or KV type,
        UnsupportedModelError for a file that does not load."""
        self.require_runnable(source)
        return LlamaCppModel(self._library(), source, options)

    def require_runnable(self, source: ModelInfo) -> None:
        """Load the vocabulary to check that the library knows the architecture. Raises
        MissingDependencyError, UnsupportedModelError."""
        if source is self._screened:
            return
        if is_plain(source):
            upstream.load_ahead()
        else:
            _require_plain_decoder(self._library(), source)
        self._screened = source

    def require_devices(self, providers: Sequence[str]) -> None:
        """See `edge_spec.core.model.Runtime`. "gpu" and "rpc0" may need servers and are checked on
        opening."""
        own = [name for name in providers if not name.lower().startswith(("gpu", "rpc"))]
        if own:
            choose_devices(own, self._library().devices())

    def devices(self, options: RuntimeOptions) -> list[placement.Device]:
        return list(listed(self.name, self._library(), options.rpc_servers))

    def open_tokenizer(self, source: ModelInfo) -> LibraryTokenizer:
        """Raises MissingDependencyError, ModelFileError."""
        bos_id = source.bos_id if source.adds_bos else None
        return LibraryTokenizer(self._library(), source.path, bos_id)

    def memory(
        self, source: ModelInfo, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        devices = self._offload_devices(options)
        moved = offload(source, options, devices, num_tokens) if devices else None
        return gguf_memory(
            source, options, num_tokens, moved, repacks=moved is not None or not wanted()
        )

    def _offload_devices(self, options: RuntimeOptions) -> tuple[LibraryDevice, ...]:
        """Return the local devices that a model would use besides the CPU; none with RPC servers,
        or if opening would fail."""
        if (
            options.gpu_layers == 0
            or set(wanted_devices(options)) == {"cpu"}
            or options.rpc_servers
        ):
            return ()
        with suppress(MissingDependencyError, UsageError):
            return choose_devices(wanted_devices(options), upstream.library().devices())
        return ()


def _require_plain_decoder(library: Library, source: ModelInfo) -> None:
    """Raises UnsupportedModelError before weights are read."""
    path, known = source.path, library.log.num_errors
    handle = library.load_model(os.fsencode(path), VOCABULARY_ONLY)
    if handle is None:
        errors = library.log.errors_after(known)
        problem = f"cannot load {path}: {errors or NO_REASON}"
        if _UNKNOWN_ARCHITECTURE in errors:
            problem = f"does not know the architecture {source.config.architecture!r} of {path}"
        raise UnsupportedModelError(
            f"{NAME} {problem}", remedy="Update the library, or convert the model again."
        )
    try:
        is_hybrid = library.llama_model_is_hybrid(handle)
        is_attention_alone = not (
            library.llama_model_is_recurrent(handle)
            or library.llama_model_is_diffusion(handle)
            or library.llama_model_has_encoder(handle)
        )
    finally:
        library.llama_model_free(handle)
    if is_hybrid:
        from edge_spec.runtimes.llamacpp.hybrid import require_known_hybrid

        require_known_hybrid(source.config.architecture, path)
    elif not is_attention_alone:
        raise UnsupportedModelError(
            f"{path} is no decoder with attention in all layers: a recurrent state cannot be "
            "rewound, which speculation and chat need",
            remedy="Use a model of attention alone.",
        )
    if not source.weight_types:
        raise UnsupportedModelError(
            f"{path} has a vocabulary and no weights", remedy="Give the file that has them."
        )
