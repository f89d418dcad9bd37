"""A model of a GGUF file in llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Capabilities, Forward, RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.errors import SessionError, UsageError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.batch import Batch, view
from edge_spec.runtimes.llamacpp.devices import (
    choose_devices,
    remote_devices,
    require_used,
    wanted_devices,
)
from edge_spec.runtimes.llamacpp.library import (
    PREFILL_TOKENS,
    ContextChoices,
    Library,
    ModelChoices,
    Way,
)
from edge_spec.runtimes.llamacpp.memory import fitted
from edge_spec.runtimes.llamacpp.weights import GgufWeights
from edge_spec.scheduler.machine import available_cores

if TYPE_CHECKING:
    from edge_spec.runtimes.llamacpp.cache import Cache
    from edge_spec.runtimes.llamacpp.session import LlamaCppSession

DEFAULT_KV_TYPE = "f16"
# The cache is attended to in steps of 256 cells; from 512 on, ggml's flash attention shares out a
# single row among the threads, which sums in another order (ggml-cpu/ops.cpp).
SETTLED_TOKENS = 272
_FLOATS = frozenset({"F32", "F16", "BF16"})  # no other types' products round activations to 8 bits
MOST_SHARING = 16  # sessions of one pass


class LlamaCppModel:
    """Weights that its sessions share, and where rows do not depend on each other, a cache."""

    def __init__(self, library: Library, source: ModelInfo, options: RuntimeOptions) -> None:
        self.config = source.config
        if options.context_length is not None:
            shorter = min(options.context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        remote = remote_devices(library, options.rpc_servers)
        devices = choose_devices(wanted_devices(options), [*remote, *library.devices()])
        require_used(options, devices)
        moved = fitted(source, options, devices)
        on_device = moved is not None
        kv_type = _kv_type(library, options)
        is_flash = options.flash_attention is not False
        self._choices = ContextChoices(
            num_tokens=self.config.context_length,
            batch_tokens=PREFILL_TOKENS,
            max_rows=MAX_ROWS,
            threads=options.threads or available_cores(),
            kv_type=kv_type,
            flash_attention=is_flash,
            on_device=on_device,
        )
        how = ModelChoices(
            devices if moved else (),
            moved.num_layers if moved else options.gpu_layers,
            options.mmap,
            num_cached=moved.num_cached if moved else 0,
            scored_tokens=options.scored_tokens,
        )
        calls = library
        if moved and library.for_devices:
            calls = library.for_devices(not options.rpc_servers)  # which end the process
        self._weights = GgufWeights(calls, source.path, self.config, how)
        is_ours = library.has_invariant_rows(source) and _has_known_heads(self.config)
        is_invariant = is_flash and not on_device and is_ours
        self._choices = replace(self._choices, invariant_rows=is_invariant)
        is_left = options.kv_type is None and options.flash_attention is None and not on_device
        is_tried = is_left and not is_invariant
        self._ways = library.cpu_ways if is_tried else (Way("as asked for"),)
        self._lock = Lock()  # sessions may be opened by several threads
        # Rows of other kernels differ by what else is in the cache, and cost nearly a pass each. Of
        # a sliding window a sequence that moves leaves out what has passed it.
        is_whole = not (self._weights.state_window or self._weights.is_hybrid)
        self._shares = is_invariant and is_whole
        self._cache: Cache | None = None  # of all sessions, where they share one
        self.choose_way(self.ways[0])
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
            self._make_rewindable(source)

    def _make_rewindable(self, source: ModelInfo) -> None:
        from edge_spec.runtimes.llamacpp.hybrid import rewindable

        self._choices = rewindable(self._weights, self._choices, source.path)
        kept = self._choices.kept_states
        self.capabilities = replace(
            self.capabilities,
            max_rows=kept + 1,
            trees=False,
            rollback_rows=kept,
        )

    @property
    def ways(self) -> Sequence[str]:
        return [way.name for way in self._ways]

    @property
    def likeliest_way(self) -> str:
        return next((way.name for way in self._ways if way.steady_rows), self.ways[0])

    def choose_way(self, name: str) -> None:
        self.way = name
        if len(self._ways) > 1:
            [chosen] = (way for way in self._ways if way.name == name)
            self._choices = replace(
                self._choices,
                kv_type=chosen.kv_type,
                steady_rows=chosen.steady_rows,
            )

    def open_session(self) -> LlamaCppSession:
        """Raises DeviceMemoryError where a device has too little memory for the cache."""
        from edge_spec.runtimes.llamacpp.cache import Cache
        from edge_spec.runtimes.llamacpp.session import LlamaCppSession

        with self._lock:
            cache = self._cache or Cache(self._weights, self._choices, self.config.context_length)
            self._cache = cache if self._shares else None
        if self._weights.is_hybrid:
            from edge_spec.runtimes.llamacpp.hybrid import HybridSession

            return HybridSession(cache)
        return LlamaCppSession(cache)

    def prepare_sharing(self, num_sessions: int) -> int:
        """Nothing has to be made: sessions that may share passes are in one cache."""
        return MOST_SHARING if self._shares else 1

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        from edge_spec.runtimes.llamacpp.session import forward_together

        assert self._cache is not None
        return forward_together(self._cache, parts, num_rows)

    def open_own_loop(self, tokens: Sequence[int]) -> LlamaCppLoop:
        """Opens it with the first of its ways, which is what its own programs do."""
        chosen = replace(self._choices, steady_rows=False)
        if len(self._ways) > 1:
            first = self._ways[0]
            chosen = replace(chosen, kv_type=first.kv_type)
        return LlamaCppLoop(self._weights, chosen, tokens)

    def close(self) -> None:
        """Closes its sessions, too."""
        self._weights.close()


_ROOM = 256  # tokens, after the first ones


class LlamaCppLoop:
    """Plain decoding as the library's own programs do it: one token a call, nothing else asked for,
    over weights that others may use, too."""

    def __init__(
        self, weights: GgufWeights, choices: ContextChoices, tokens: Sequence[int]
    ) -> None:
        """choices: its fastest ones. Raises SessionError, DeviceMemoryError."""
        self._library = weights.library
        self._batch = Batch(self._library.batch_type, PREFILL_TOKENS, 1)
        wanted = replace(choices, num_tokens=len(tokens) + _ROOM)
        self._opened = weights.open_context(self, wanted)
        self._vocab_size = weights.vocab_size
        self._length = 0
        for start in range(0, len(tokens), PREFILL_TOKENS):
            part = tokens[start : start + PREFILL_TOKENS]
            self._decode(self._batch.chain(part, self._length, is_scored=False), len(part))
        self._library.synchronize(self._opened.handle)  # or the first step would pay for it

    def step(self, token: int) -> None:
        self._decode(self._batch.chain([token], self._length), 1)
        self._library.logits(self._opened.handle)  # waits for them

    def logits(self) -> np.ndarray:
        """[vocab] float32, of the last step, in the library's own buffer."""
        address = self._library.logits(self._opened.handle)
        logits: np.ndarray = view(self._library, address, 1, self._vocab_size)[0]
        return logits

    def close(self) -> None:
        self._opened.free()

    def _decode(self, batch: object, count: int) -> None:
        status = self._library.decode(self._opened.handle, batch)
        if status:
            raise SessionError(
                f"{self._library.name} failed to score {count} tokens (status {status})",
                remedy="Give a shorter --context.",
            )
        self._length += count


def _has_known_heads(config: ModelConfig) -> bool:
    """Whether attention has kernels for all heads (kMaxHeadSize of rows/kernels.h; where a cache is
    quantized, the library itself refuses sizes that its blocks do not divide)."""
    sizes = {config.heads(layer).head_dim for layer in config.attending}
    return all(size % 8 == 0 and size <= 512 for size in sizes)


def _kv_type(library: Library, options: RuntimeOptions) -> str:
    flash = options.flash_attention is not False
    usable = library.flash_kv_types if flash else library.plain_kv_types
    name = (options.kv_type or DEFAULT_KV_TYPE).lower()
    if name not in usable:
        attention = "with" if flash else "without"
        raise UsageError(
            f"{library.name} takes no KV type {name!r} {attention} flash attention",
            remedy=f"Choose one of {', '.join(usable)}.",
        )
    return name
