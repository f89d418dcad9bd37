"""The sessions of a whole model: each owns a KV cache, which on the CPU parts of the model share.

Parts are for self-speculation. Early exit: Elhoushi et al. 2024 (LayerSkip). Layer skipping: Zhang
et al. 2023 (Draft & Verify), Xia et al. 2024 (SWIFT). A part writes after what its target has
committed, and the target's next pass overwrites that in every layer; so it cannot change what the
target scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, Session, require_rollback
from edge_spec.core.source_session import SourceSession
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.runtimes.ort.device_memory import DeviceCache, moving_graph, shares_weights
from edge_spec.runtimes.ort.fewer_threads import FewerThreads
from edge_spec.runtimes.ort.graph_loader import GraphLoader
from edge_spec.runtimes.ort.growing import GrowingPasses
from edge_spec.runtimes.ort.passes import HostCache, Passes
from edge_spec.runtimes.ort.signature import Graph, pass_error


class _Session:
    """What a session commits, and the passes that score what comes after it."""

    def __init__(self, passes: Passes | GrowingPasses) -> None:
        self.length = 0
        self._passes = passes

    def prefill(self, tokens: Sequence[int]) -> None:
        self._claim()
        for length, features in self._passes.prefill(tokens, self.length):
            start = self.length
            self._move(length)
            if features is not None:
                self._report(start, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._claim()
        return self._passes.score(tree, self.length)

    def commit(self, rows: Sequence[int]) -> None:
        self._passes.keep(rows, self.length)
        self._move(self.length + len(rows))

    def _claim(self) -> None:
        """Makes the tokens after the length this session's."""

    def _move(self, length: int) -> None:
        self.length = length

    def _report(self, start: int, features: np.ndarray) -> None:
        """Tells of prefilled tokens from `start` on."""


class OrtSession(_Session):
    """One with a cache of its own. On a device it has no parts: their graph would be there with
    weights of its own."""

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._passes.forget()
        self._move(length)

    def state(self) -> dict[str, np.ndarray]:
        return self._passes.cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._passes.cache.restore(state, length)
        self._passes.forget()
        self._move(length)

    def interrupt(self) -> None:
        self._passes.interrupt()

    def close(self) -> None:
        self._passes.close()
        self._passes.cache.clear()


class PartialSession(_Session):
    """peers: all parts of `target`, which may include this one."""

    _passes: Passes

    def __init__(self, passes: Passes, target: Session, peers: list[PartialSession]) -> None:
        super().__init__(passes)
        assert passes.runs is not None
        self.length = target.length
        self._runs = passes.runs
        self._target = target
        self._peers = peers

    @property
    def skipped(self) -> frozenset[int]:
        """Sublayers that are left out: 2 * layer its attention, 2 * layer + 1 its MLP.

        May be set between passes, at no cost. Raises UsageError for one that does not exist.
        """
        return frozenset(np.flatnonzero(~self._runs).tolist())

    @skipped.setter
    def skipped(self, skipped: frozenset[int]) -> None:
        unknown = skipped.difference(range(len(self._runs)))
        if unknown:
            raise UsageError(
                f"the model has no sublayer {min(unknown)}",
                remedy=f"Choose from 0 to {len(self._runs) - 1}.",
            )
        self._runs[:] = True
        self._runs[list(skipped)] = False

    def rollback(self, length: int) -> None:
        """Rolls back to any length that this session or its target has reached."""
        require_rollback(max(self.length, self._target.length), length)
        self.length = length

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        """[2 * layers] float64: 1 - cosine similarity of the residual stream before and after each
        sublayer, with none left out; mean over `tokens` after the committed ones.

        Block influence: Men et al. 2024, ShortGPT. Commits nothing. Raises ContextFullError.
        """
        self._claim()
        runs = self._runs.copy()
        self._runs[:] = True
        turned = np.zeros(len(runs))
        try:
            for before, *updates in self._passes.updates(tokens, self.length):
                for sublayer, update in enumerate(updates):
                    after = before + update
                    turned[sublayer] += np.sum(1 - _cosines(before, after))
                    before = after
        finally:
            self._runs[:] = runs
        return turned / len(tokens)

    def close(self) -> None:
        if self in self._peers:
            self._peers.remove(self)
        self._passes.close()

    def _claim(self) -> None:
        """Makes the tokens after the own length this session's.

        Raises ValueError where the target has committed them.
        """
        if self.length < self._target.length:
            raise ValueError(
                f"a pass at {self.length} tokens would overwrite some of the "
                f"{self._target.length} that the target has committed"
            )
        for peer in self._peers:
            peer.length = min(peer.length, self.length)


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cosine of each row; [rows, hidden] float32 -> [rows] float64."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    similar: np.ndarray = np.sum(a * b, axis=1) / np.sqrt(
        np.sum(a * a, axis=1) * np.sum(b * b, axis=1)
    )
    return similar


# From a source to keys and values, by the names of the decoder's inputs.
Encode = Callable[[Sequence[int]], Mapping[str, np.ndarray]]
OpenFeatures = Callable[[Sequence[int]], onnxruntime.InferenceSession]


class HostSession(OrtSession):
    """On the CPU. open_partial: loads the graph in which every sublayer is optional, or returns it
    again. encode: reads a source, where an encoder stands before the model. open_features: loads
    the graph that gives these features, or returns it again.

    Whatever this session does, its parts have then committed exactly what it has.
    """

    _passes: Passes

    def __init__(
        self,
        inference: onnxruntime.InferenceSession,
        config: ModelConfig,
        open_partial: Callable[[], onnxruntime.InferenceSession],
        fewer: FewerThreads | None = None,
        encode: Encode | None = None,
        open_features: OpenFeatures | None = None,
    ) -> None:
        graph = Graph.of(inference)
        # One token more than the context, for the second row of a single one (passes.MIN_ATTENDED).
        self._cache = HostCache(config, graph.has_stacked, graph.cache, spare_tokens=1)
        super().__init__(Passes(graph, config, self._cache))
        self._config = config
        self._open_partial = open_partial
        self._parts: list[PartialSession] = []
        self._fewer = fewer
        self._encode = encode
        self._open_features = open_features
        self._on_prefilled: OnPrefilled | None = None  # while features are collected
        self._threads = None if fewer is None else fewer.governor()

    @property
    def passes(self) -> Passes:
        """Returns the passes of this session, before one that other sessions share."""
        self._claim()
        return self._passes

    def forward(self, tree: TokenTree) -> Forward:
        started_s = time.perf_counter()
        out = super().forward(tree)
        if self._fewer is not None and self._threads is not None:
            before = self._threads.threads
            threads = self._threads.observe(len(tree), time.perf_counter() - started_s)
            if threads != before and (inference := self._fewer.inference(threads)) is not None:
                self._passes.use(inference)
        return out

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self._cache.shrink(length)

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

    def close(self) -> None:
        self._parts.clear()
        super().close()

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
        graph = Graph.of(self._open_partial())
        part = PartialSession(Passes(graph, self._config, self._cache, runs), self, self._parts)
        part.skipped = skipped
        self._parts.append(part)
        return part

    def _claim(self) -> None:
        self._move(self.length)

    def _move(self, length: int) -> None:
        self.length = length
        for part in self._parts:
            part.length = length

    def _report(self, start: int, features: np.ndarray) -> None:
        if self._on_prefilled is not None:
            self._on_prefilled(start, features)


def device_sessions(
    loader: GraphLoader, inference: onnxruntime.InferenceSession
) -> Callable[[], OrtSession]:
    """Returns what opens sessions in a device's memory. inference: of the model in the form of
    `loader`. Where that takes trees, and large weights can be shared (graph_forms.py), the form for
    chains alone is loaded beside it. Raises BundleError, DeviceError."""
    place, form, config = loader.place, loader.form, loader.config
    assert place is not None
    graph, chains = Graph.of(inference), None
    if form is not None and form.takes_trees and shares_weights(place, config):
        chains = Graph.of(loader.open_form(replace(form, takes_trees=False)))
    moving = loader.open_beside(moving_graph(graph.cache))

    def opened() -> OrtSession:
        cache = DeviceCache(config, graph.cache, place, moving)
        return OrtSession(Passes(graph, config, cache, chains=chains))

    return opened


def encode(
    inference: onnxruntime.InferenceSession, source: Sequence[int]
) -> Mapping[str, np.ndarray]:
    """inference: of exporters/onnx/graph.py. Raises SessionError, DeviceMemoryError."""
    names = [value.name for value in inference.get_outputs()]
    try:
        found = inference.run(names, {"input_ids": np.array([source], np.int64)})
    except Exception as error:
        raise pass_error(error, len(source), 0) from error
    return dict(zip(names, found, strict=True))


class OrtSourceSession(SourceSession):
    """One whose passes can be ended, as those of its decoder can."""

    def __init__(self, decoder: HostSession, config: ModelConfig) -> None:
        assert config.encoder is not None
        super().__init__(decoder, config.encoder, config.context_length)
        self.interrupt = decoder.interrupt
