"""The reference transformer in numpy, float32, with which every runtime and export is compared.

A `ReferenceModel` keeps all weights in float32. `ReferenceLayerStream` keeps none: all sequences
pass a layer together, so that each matrix is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.export import Observe
from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import (
    Capabilities,
    Forward,
    Runtime,
    RuntimeOptions,
    require_rollback,
    require_room,
)
from edge_spec.core.model_info import TensorRows, Tensors
from edge_spec.core.runtime_protocols import PassPart, forward_one_by_one
from edge_spec.core.source_session import SourceSession
from edge_spec.core.tree import TokenTree, preceding
from edge_spec.models.devices import CPU, Device, processor
from edge_spec.runtimes.kv_cache import KvCache
from edge_spec.runtimes.libraries import pick_device
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic, Heads, Weights


def encode(weights: Weights, source: np.ndarray) -> np.ndarray:
    """Return the source's keys and values for each decoder layer, [layers, 2, heads, tokens,
    head_dim]."""
    run, config = Arithmetic(weights, source, np.arange(len(source))), weights.config
    assert config.encoder is not None
    residual = run.embed("encoder")
    update: np.ndarray | None = None
    for layer in range(config.encoder.num_layers):
        update, residual = run.pass_encoder_layer(layer, update, residual)
    x, _ = run.add_and_norm(update, residual, "encoder.norm")
    layers = [f"model.layers.{layer}.cross_attn." for layer in range(config.num_layers)]
    return np.stack([[run.project_heads(x, prefix, part) for part in "kv"] for prefix in layers])


class _Pass(Arithmetic):
    """A tree's rows after `length` cached tokens, which they all see. memory: a source's keys and
    values."""

    def __init__(
        self,
        weights: Weights,
        tree: TokenTree,
        cache: KvCache,
        length: int,
        memory: np.ndarray | None,
    ) -> None:
        super().__init__(weights, tree.tokens, length + tree.depths)
        self._cache, self._memory = cache, memory
        self._new = slice(length, length + len(tree))  # slots in the cache
        past = np.ones((len(tree), length), bool)
        self._mask = np.concatenate([past, tree.ancestors], axis=1)
        self._cached = np.concatenate([np.arange(length), self.positions])
        self._before = preceding(tree.parents, length, self.config.num_preceding)

    def attend_to_own(self, layer: int, heads: Heads) -> np.ndarray:
        keys, values = self._cache.of_layer(layer)
        keys[:, self._new], values[:, self._new] = heads.keys, heads.values
        return self._mix(layer, heads.queries, keys, values)

    def attend_to_another(self, layer: int, queries: np.ndarray) -> np.ndarray:
        return self._mix(layer, queries, *self._cache.of_layer(self.config.kv_source(layer)))

    def _mix(
        self, layer: int, queries: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        end = self._new.stop
        whole = Heads(queries, keys[:, :end], values[:, :end])
        return self.mix(layer, whole, self._mask, self.positions, self._cached)

    def attend_to_source(self, x: np.ndarray, layer: int) -> np.ndarray:
        assert self._memory is not None
        prefix = f"model.layers.{layer}.cross_attn."
        queries = self.project_heads(x, prefix, "q")
        return self.join_heads(self.mix_all(Heads(queries, *self._memory[layer])), prefix)

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        kept = self._cache.gated(layer)
        kept[self._new] = gated
        found: np.ndarray = kept[self._before]
        return found


class ReferenceSession:
    def __init__(self, model: Weights) -> None:
        self.length = 0
        self._model = model
        self._memory: np.ndarray | None = None  # keys and values of a source
        self._features: tuple[int, ...] = ()
        self._on_prefilled: OnPrefilled | None = None
        self._cache = KvCache(model.config)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), MAX_ROWS):
            first, *others = tokens[start : start + MAX_ROWS]
            features = self._run(TokenTree.chain(first, others))[2]
            start_of_chunk, self.length = self.length, self.length + 1 + len(others)
            if self._on_prefilled is not None and features is not None:
                self._on_prefilled(start_of_chunk, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._reserve(len(tree))
        run, hidden, features = self._run(tree)
        return Forward(run.score(hidden), hidden, features)

    def commit(self, rows: Sequence[int]) -> None:
        self._cache.compact(self.length, rows)
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length

    @property
    def collects(self) -> bool:
        return bool(self._features)

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        require_layers(layers, self._model.config.num_layers)
        self._features, self._on_prefilled = tuple(layers), on_prefilled

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """See `edge_spec.core.features.SharesKeysValues`; the cache always has them."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self._cache.of_layer(layer)
        return keys[:, : self.length], values[:, : self.length]

    def attend_to(self, source: Sequence[int]) -> None:
        self._memory = encode(self._model, np.asarray(source))

    def state(self) -> dict[str, np.ndarray]:
        return self._cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._cache.restore(state, length)
        self.length = length

    def close(self) -> None:
        self._cache.clear()
        self._memory = None

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._model.config.context_length)
        self._cache.reserve(self.length + rows, self.length)

    def _run(self, tree: TokenTree) -> tuple[_Pass, np.ndarray, np.ndarray | None]:
        """Return the pass, its hidden states [rows, hidden] after the final norm, and the collected
        features [rows, features, hidden]. Writes to the cache after `length`."""
        run = _Pass(self._model, tree, self._cache, self.length, self._memory)
        residual = run.embed()
        update: np.ndarray | None = None
        inputs, streams = run.layer_inputs(residual), []
        for layer in range(run.config.num_layers):
            if layer in self._features:
                streams.append(residual if update is None else residual + update)
            update, residual = run.pass_layer(layer, update, residual, inputs)
        hidden, _ = run.add_and_norm(update, residual, "model.norm")
        if run.config.num_layers in self._features:
            streams.append(hidden)
        return run, hidden, np.stack(streams, axis=1) if streams else None


class _UnkeptWeights(Weights):
    """Read each weight at each use."""

    def __init__(self, source: TensorRows, context_length: int) -> None:
        super().__init__(source, context_length)
        self._source = source

    def whole(self, name: str) -> np.ndarray:
        return self._source.float32(name)

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        return self._source.float32_rows(name, numbers)


_SERIAL_PRODUCT = 1 << 18  # multiplications; up to here OpenBLAS uses one thread
_HEAD_ROWS = 8192  # tokens at a time: 128 MB at a hidden size of 4096


class ReferenceLayerStream(Arithmetic):
    """See `edge_spec.core.export.LayerStream`."""

    def __init__(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> None:
        """Raises ContextFullError for a sequence beyond the model's context."""
        longest = max(map(len, sequences))
        require_room(0, longest, source.config.context_length)
        positions = np.concatenate([np.arange(len(tokens)) for tokens in sequences])
        super().__init__(_UnkeptWeights(source, longest), np.concatenate(sequences), positions)
        self.num_done = 0
        self._observe = observe
        ends = np.cumsum([len(tokens) for tokens in sequences])
        self._spans = [
            slice(end - len(each), end) for each, end in zip(sequences, ends, strict=True)
        ]
        self._residual = self.embed()
        self._update: np.ndarray | None = None
        self._inputs = self.layer_inputs(self._residual)
        self._kept: dict[int, Heads] = {}  # of layers whose keys later ones read

    def linear(
        self, x: np.ndarray, prefix: str, parts: Sequence[str], has_bias: bool = False
    ) -> np.ndarray:
        if self._observe is not None:
            self._observe(f"{prefix}{parts[0]}.weight", x)
        return super().linear(x, prefix, parts, has_bias)

    def advance(self) -> None:
        stream = self._update, self._residual
        self._update, self._residual = self.pass_layer(self.num_done, *stream, self._inputs)
        self.num_done += 1

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return [len(rows), vocab]. rows: indices among all sequences' rows."""
        update = None if self._update is None else self._update[rows]
        return self.score(self.add_and_norm(update, self._residual[rows], "model.norm")[0])

    def head(self, hidden: np.ndarray, output: str) -> np.ndarray:
        """Score part of the vocabulary at a time."""
        if self._observe is not None:
            self._observe(self.head_name, hidden)
        size = self.config.vocab_size
        scores = np.empty((len(hidden), size), np.float32)
        for start in range(0, size, _HEAD_ROWS):
            part = np.arange(start, min(start + _HEAD_ROWS, size))
            head = self.weights.rows(self.head_name, part)
            scores[:, start : start + len(part)] = hidden @ head.T
        return scores

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        found = np.zeros((self.config.num_preceding, *gated.shape), gated.dtype)
        for span in self._spans:
            for distance, before in enumerate(found, start=1):
                before[span][distance:] = gated[span][:-distance]
        return found

    def attend_to_another(self, layer: int, queries: np.ndarray) -> np.ndarray:
        source = self._kept[self.config.kv_source(layer)]
        return self.attend_to_own(layer, Heads(queries, source.keys, source.values))

    def attend_to_own(self, layer: int, heads: Heads) -> np.ndarray:
        """Attend with few rows at a time: products so small that the matrix library uses one
        thread. More threads would wait thousands of times whenever other processes have a core."""
        if layer in self.config.kv_sources[layer + 1 :]:
            self._kept[layer] = heads
        mixed = np.empty_like(heads.queries)
        for span in self._spans:
            own = Heads(*(part[:, span] for part in heads))
            length = own.keys.shape[1]
            step = max(1, _SERIAL_PRODUCT // (length * heads.keys.shape[-1]))
            for start in range(0, length, step):
                end = min(start + step, length)
                part = Heads(own.queries[:, start:end], own.keys[:, :end], own.values[:, :end])
                seen = np.tri(end - start, end, start, dtype=bool)
                found = self.mix(layer, part, seen, np.arange(start, end), np.arange(end))
                mixed[:, span.start + start : span.start + end] = found
        return mixed


class ReferenceModel(Weights):
    """A model that keeps all weights."""

    capabilities = Capabilities(max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True)

    def open_session(self) -> ReferenceSession | SourceSession:
        session = ReferenceSession(self)
        if self.config.encoder is None:
            return session
        return SourceSession(session, self.config.encoder, self.config.context_length)

    def prepare_sharing(self, num_sessions: int) -> int:
        return num_sessions

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Run one after the other, as the reference for shared passes."""
        return forward_one_by_one(parts)

    def close(self) -> None:
        self._kept.clear()


class ReferenceRuntime(Runtime):
    name = "reference"
    reads = "checkpoint"

    def open(self, source: Tensors, options: RuntimeOptions) -> ReferenceModel:
        # numpy uses one thread, whatever was asked for.
        options.require_only(self.name, "threads", "providers", "context_length")
        pick_device(self.name, options.providers, [CPU])
        return ReferenceModel(source, options.context_length)

    def open_layers(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> ReferenceLayerStream:
        return ReferenceLayerStream(source, sequences, observe)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [processor(self.name)]
