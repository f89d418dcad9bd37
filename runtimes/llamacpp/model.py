"""A GGUF model in llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.errors import UsageError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp import hybrid
from edge_spec.runtimes.llamacpp.cache import Cache
from edge_spec.runtimes.llamacpp.devices import (
    choose_devices,
    remote_devices,
    require_used,
    wanted_devices,
)
from edge_spec.runtimes.llamacpp.guard import device_library
from edge_spec.runtimes.llamacpp.library import (
    DEFAULT_KV_TYPE,
    KV_TYPES,
    NAME,
    PLAIN_KV_TYPES,
    ContextChoices,
    Library,
    ModelChoices,
)
from edge_spec.runtimes.llamacpp.memory import fitted
from edge_spec.runtimes.llamacpp.session import LlamaCppSession, forward_together
from edge_spec.runtimes.llamacpp.weights import GgufWeights
from edge_spec.scheduler.machine import available_cores

# Attention covers cells in steps of 256. From 512 on, ggml's flash attention splits a single row
# among threads, which changes the order of its sums (ggml-cpu/ops.cpp).
SETTLED_TOKENS = 272
_FLOATS = frozenset({"F32", "F16", "BF16"})  # other types' products round activations to 8 bits
MOST_SHARING = 16  # sessions per pass


class LlamaCppModel:
    """Weights that sessions share, and a cache too if `invariant_rows` allows."""

    def __init__(self, library: Library, source: ModelInfo, options: RuntimeOptions) -> None:
        self.config = source.config
        if options.context_length is not None:
            shorter = min(options.context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        remote = remote_devices(library, options.rpc_servers)
        devices = choose_devices(wanted_devices(options), [*remote, *library.devices()])
        require_used(options, devices)
        moved = fitted(source, options, devices)
        on_device, kv_type = moved is not None, _kv_type(options)
        how = ModelChoices(
            devices if moved else (),
            moved.num_layers if moved else options.gpu_layers,
            options.mmap,
            num_cached=moved.num_cached if moved else 0,
            scored_tokens=options.scored_tokens,
        )
        # A lost RPC server ends the process: no guard helps.
        calls = device_library(library, not options.rpc_servers) if moved else library
        self._weights = GgufWeights(calls, source.path, self.config, how)
        is_flash = options.flash_attention is not False
        is_ours = library.has_invariant_rows(source) and _has_known_heads(self.config)
        is_invariant = is_flash and not on_device and is_ours
        choices = ContextChoices(
            num_tokens=self.config.context_length,
            threads=options.threads or available_cores(),
            kv_type=kv_type,
            flash_attention=is_flash,
            on_device=on_device,
            invariant_rows=is_invariant,
        )
        # With other kernels a row's bits depend on the rest of the cache, and rows cost nearly a
        # pass each. A moved sequence loses what its sliding window has passed.
        is_whole = not (self._weights.state_window or self._weights.is_hybrid)
        self._shares = is_invariant and is_whole
        self._cache: Cache | None = None  # of all sessions if they share one
        self._lock = Lock()  # threads may open sessions concurrently
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS,
            trees=True,
            rollback=True,
            hidden_states=self._weights.gives_final_states,
            settled_tokens=SETTLED_TOKENS,
            rounds_activations=not on_device and bool(source.weight_types - _FLOATS),
            invariant_rows=is_invariant,
            kernels=None if on_device else library.kernels(source),
        )
        if self._weights.is_hybrid:
            choices = hybrid.rewindable(self._weights, choices, source.path)
            self.capabilities = hybrid.rewindable_capabilities(self.capabilities, choices)
        is_left = options.kv_type is None and options.flash_attention is None and not on_device
        self._ways = _ways(choices) if is_left and not is_invariant else {"as asked for": choices}
        self.way = self.ways[0]

    @property
    def ways(self) -> Sequence[str]:
        return list(self._ways)

    @property
    def likeliest_way(self) -> str:
        return next((name for name, each in self._ways.items() if each.steady_rows), self.ways[0])

    def choose_way(self, name: str) -> None:
        self.way = name

    def open_session(self) -> LlamaCppSession:
        """Raises DeviceMemoryError if a device has too little memory for the cache."""
        with self._lock:
            cache = self._cache or Cache(self._weights, self._ways[self.way])
            self._cache = cache if self._shares else None
        return (hybrid.HybridSession if self._weights.is_hybrid else LlamaCppSession)(cache)

    def prepare_sharing(self, num_sessions: int) -> int:
        """Return how many sessions may share a pass: all share one cache already."""
        return MOST_SHARING if self._shares else 1

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """num_rows is unused: a row's bits do not depend on the pass width."""
        return forward_together(parts)

    def close(self) -> None:
        """Free the weights and all sessions."""
        self._weights.close()


def _ways(choices: ContextChoices) -> dict[str, ContextChoices]:
    """Return the ways to compute attention if no option chooses, fastest first.

    ggml splits a single row among threads, which changes the order of its sums. Different types of
    keys and values prevent that, but slow prefill down.
    """
    return {
        "f16": choices,
        "f16, single rows by the kernel of wider passes": replace(choices, steady_rows=True),
        "f16-bf16": replace(choices, kv_type="f16-bf16"),
    }


def _has_known_heads(config: ModelConfig) -> bool:
    """Return whether our attention takes all heads (kMaxHeadSize of rows/kernels.h). The library
    checks quantized caches itself."""
    sizes = {config.heads(layer).head_dim for layer in config.attending}
    return all(size % 8 == 0 and size <= 512 for size in sizes)


def _kv_type(options: RuntimeOptions) -> str:
    flash = options.flash_attention is not False
    usable = tuple(KV_TYPES) if flash else PLAIN_KV_TYPES
    name = (options.kv_type or DEFAULT_KV_TYPE).lower()
    if name not in usable:
        attention = "with" if flash else "without"
        raise UsageError(
            f"{NAME} takes no KV type {name!r} {attention} flash attention",
            remedy=f"Choose one of {', '.join(usable)}.",
        )
    return name
