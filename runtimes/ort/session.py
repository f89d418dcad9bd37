"""The session of a whole model: it owns a KV cache that parts of the model may share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, require_rollback
from edge_spec.core.source_session import SourceSession
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.runtimes.kv_cache import KvCache
from edge_spec.runtimes.ort.fewer_threads import FewerThreads
from edge_spec.runtimes.ort.partial import PartialSession
from edge_spec.runtimes.ort.passes import Passes
from edge_spec.runtimes.ort.signature import Signature, pass_error
from edge_spec.runtimes.ort.stacked import has_stacked

# From a source to keys and values, by the names of the decoder's inputs.
Encode = Callable[[Sequence[int]], Mapping[str, np.ndarray]]
OpenFeatures = Callable[[Sequence[int]], onnxruntime.InferenceSession]


class OrtSession:
    """open_partial: loads the graph in which every sublayer is optional, or returns it again.
    encode: reads a source, where an encoder stands before the model. open_features: loads the graph
    that gives these features, or returns it again.

    Whatever this session does, its parts have then committed exactly what it has.
    """

    def __init__(
        self,
        inference: onnxruntime.InferenceSession,
        config: ModelConfig,
        open_partial: Callable[[], onnxruntime.InferenceSession],
        fewer: FewerThreads | None = None,
        encode: Encode | None = None,
        open_features: OpenFeatures | None = None,
    ) -> None:
        self.length = 0
        self._config = config
        self._open_partial = open_partial
        # One token more than the context, for the second row of a single one (passes.MIN_ATTENDED).
        element = Signature.of(inference).cache
        self._cache = KvCache(config, has_stacked(inference), element, spare_tokens=1)
        self._passes = Passes(inference, config, self._cache)
        self._parts: list[PartialSession] = []
        self._fewer = fewer
        self._encode = encode
        self._open_features = open_features
        self._on_prefilled: OnPrefilled | None = None  # while features are collected
        self._threads = None if fewer is None else fewer.governor()

    def prefill(self, tokens: Sequence[int]) -> None:
        for length, features in self._passes.prefill(tokens, self.length):
            start = self.length
            self._move(length)
            if self._on_prefilled is not None and features is not None:
                self._on_prefilled(start, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._move(self.length)
        started_s = time.perf_counter()
        out = self._passes.score(tree, self.length)
        if self._fewer is not None and self._threads is not None:
            before = self._threads.threads
            threads = self._threads.observe(len(tree), time.perf_counter() - started_s)
            if threads != before and (inference := self._fewer.inference(threads)) is not None:
                self._passes.use(inference)
        return out

    @property
    def passes(self) -> Passes:
        """Returns the passes of this session, before one that other sessions share."""
        self._move(self.length)
        return self._passes

    def commit(self, rows: Sequence[int]) -> None:
        self._passes.keep(rows, self.length)
        self._move(self.length + len(rows))

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._cache.shrink(length)
        self._move(length)

    @property
    def collects(self) -> bool:
        return self._on_prefilled is not None

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """See `edge_spec.core.features.GivesFeatures`. The first call loads the graph again, and
        sessions that are opened from then on use it, too. Raises BundleError for a bundle whose
        graph is not known."""
        require_layers(layers, self._config.num_layers)
        if not layers and not self.collects:
            return
        assert self._open_features is not None
        self._passes.collect(self._open_features(layers), layers)
        self._on_prefilled = on_prefilled if layers else None

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """See `edge_spec.core.features.SharesKeysValues`: they are there in any case."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """See `edge_spec.core.features.SharesKeysValues`."""
        keys, values = self._cache.of_layer(layer)
        return keys[:, : self.length], values[:, : self.length]

    def attend_to(self, source: Sequence[int]) -> None:
        """See `edge_spec.core.source_session.DecoderSession`."""
        assert self._encode is not None
        self._passes.attend_to(self._encode(source))

    def state(self) -> dict[str, np.ndarray]:
        return self._cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._cache.restore(state, length)
        self._move(length)

    def interrupt(self) -> None:
        self._passes.interrupt()

    def close(self) -> None:
        self._parts.clear()
        self._passes.close()
        self._cache.clear()

    def open_exit(self, num_layers: int) -> PartialSession:
        """An early exit, which shares the cache. See `open_skipping` for what it costs.

        Raises UsageError for a count that is not 1 to one less than the model has.
        """
        layers = self._config.num_layers
        if not 1 <= num_layers < layers:
            raise UsageError(
                f"no exit after {num_layers} of {layers} layers",
                remedy=f"Choose 1 to {layers - 1}.",
            )
        return self.open_skipping(frozenset(range(2 * num_layers, 2 * layers)))

    def open_skipping(self, skipped: frozenset[int]) -> PartialSession:
        """A part of the model, which shares the cache.

        All parts of a model's sessions share a second copy of its weights as onnxruntime has
        packed them, as large as the first (145 MB for the demo model), made at the first call.
        Raises UsageError for a sublayer that the model does not have, or for an older bundle.
        """
        runs = np.ones(2 * self._config.num_layers, np.bool_)
        passes = Passes(self._open_partial(), self._config, self._cache, runs)
        part = PartialSession(passes, self, self._parts)
        part.skipped = skipped
        self._parts.append(part)
        return part

    def _move(self, length: int) -> None:
        self.length = length
        for part in self._parts:
            part.length = length


def encode(
    inference: onnxruntime.InferenceSession, source: Sequence[int]
) -> Mapping[str, np.ndarray]:
    """inference: of exporters/onnx/encoder.py. Raises SessionError, DeviceMemoryError."""
    names = [value.name for value in inference.get_outputs()]
    try:
        found = inference.run(names, {"input_ids": np.array([source], np.int64)})
    except Exception as error:
        raise pass_error(error, len(source), 0) from error
    return dict(zip(names, found, strict=True))


class OrtSourceSession(SourceSession):
    """One whose passes can be ended, as those of its decoder can."""

    def __init__(self, decoder: OrtSession, config: ModelConfig) -> None:
        assert config.encoder is not None
        super().__init__(decoder, config.encoder, config.context_length)
        self.interrupt = decoder.interrupt
