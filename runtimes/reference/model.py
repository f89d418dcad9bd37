"""The reference transformer: numpy in float32, what every runtime and export is compared with.

A model that is opened keeps all of its weights in float32. `ReferenceLayerStream` keeps none: all
sequences pass a layer together, so that each matrix is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from edge_spec.errors import UsageError
from edge_spec.models.devices import Device, processor
from edge_spec.runtimes.kv_cache import KvCache
from edge_spec.runtimes.reference.arithmetic import (
    MAX_ROWS,
    Arithmetic,
    Heads,
    Positions,
    mix,
    side_by_side,
)


def encoded(model: Arithmetic, source: np.ndarray) -> np.ndarray:
    """Returns keys and values of all the decoder's layers [layers, 2, heads, tokens, head_dim].

    source: its tokens, each of which sees all others.
    """
    config = model.config
    assert config.encoder is not None
    x = model.embed(source, np.arange(len(source)), "encoder")
    for layer in range(config.encoder.num_layers):
        x = _layer(model, x, f"encoder.layers.{layer}.")
    x = model.norm(x, "encoder.norm")
    layers = [f"model.layers.{layer}.cross_attn." for layer in range(config.num_layers)]
    return np.stack(
        [[model.split_heads(x, f"{prefix}{part}_proj") for part in "kv"] for prefix in layers]
    )


def _layer(model: Arithmetic, x: np.ndarray, prefix: str) -> np.ndarray:
    """The residual stream [tokens, hidden] after a layer."""
    relative, positions = model.config.relative_positions, np.arange(len(x))
    x, normed = model.read(x, prefix + "input_layernorm")
    heads = Heads(*(model.split_heads(normed, f"{prefix}self_attn.{part}_proj") for part in "qkv"))
    bias = None
    if relative is not None:
        weight = model.weight("encoder.relative_bias.weight")
        bias = relative.bias(weight, positions, positions, both_ways=True)
    seen = np.ones((len(x), len(x)), bool)
    mixed = mix(heads, seen, model.divisor(model.config.head_dim), None, bias=bias)
    x = x + model.linear(side_by_side(mixed), prefix + "self_attn.o_proj")
    return model.with_mlp(x, prefix)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a pass in their text: see `edge_spec.runtimes.reference.arithmetic.Context`."""

    model: Arithmetic
    cache: KvCache
    new: slice  # of the cached tokens
    mask: np.ndarray  # [rows, cached] bool
    positions: Positions
    before: np.ndarray  # [count, rows] int64, as `preceding` has them

    @classmethod
    def of(cls, tree: TokenTree, model: Arithmetic, cache: KvCache, length: int) -> _Rows:
        """tree: its rows follow `length` cached tokens, which all of them see."""
        past = np.ones((len(tree), length), bool)
        rows = length + tree.depths
        return cls(
            model,
            cache,
            slice(length, length + len(tree)),
            np.concatenate([past, tree.ancestors], axis=1),
            Positions(rows, np.concatenate([np.arange(length), rows])),
            preceding(tree.parents, length, model.config.num_preceding),
        )

    def attend(self, layer: int, heads: Heads) -> np.ndarray:
        keys, values = self.cache.of_layer(layer)
        keys[:, self.new], values[:, self.new] = heads.keys, heads.values
        return self._mixed(layer, heads.queries, keys, values)

    def attend_to_source(self, layer: int, queries: np.ndarray) -> np.ndarray:
        source = self.model.config.kv_source(layer)
        return self._mixed(layer, queries, *self.cache.of_layer(source))

    def _mixed(
        self, layer: int, queries: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        end = self.new.stop
        whole = Heads(queries, keys[:, :end], values[:, :end])
        return self.model.mix(layer, whole, self.mask, self.positions)

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        kept = self.cache.gated(layer)
        kept[self.new] = gated
        found: np.ndarray = kept[self.before]
        return found


class ReferenceSession:
    def __init__(self, model: Arithmetic) -> None:
        self.length = 0
        self._model = model
        self._memory: np.ndarray | None = None  # keys and values of an encoded source
        self._features: tuple[int, ...] = ()
        self._on_prefilled: OnPrefilled | None = None
        self._cache = KvCache(model.config)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), MAX_ROWS):
            first, *others = tokens[start : start + MAX_ROWS]
            _, features = self._hidden(TokenTree.chain(first, others))
            start_of_chunk, self.length = self.length, self.length + 1 + len(others)
            if self._on_prefilled is not None and features is not None:
                self._on_prefilled(start_of_chunk, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._reserve(len(tree))
        hidden, features = self._hidden(tree)
        return Forward(self._model.logits(hidden), hidden, features)

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
        """See `edge_spec.core.features.GivesFeatures`."""
        require_layers(layers, self._model.config.num_layers)
        self._features, self._on_prefilled = tuple(layers), on_prefilled

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """See `edge_spec.core.features.SharesKeysValues`: they are there in any case."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """See `edge_spec.core.features.SharesKeysValues`."""
        keys, values = self._cache.of_layer(layer)
        return keys[:, : self.length], values[:, : self.length]

    def attend_to(self, source: Sequence[int]) -> None:
        """See `edge_spec.core.source_session.DecoderSession`."""
        self._memory = encoded(self._model, np.asarray(source))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the state of the cache (`KvCache.state`)."""
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

    def _hidden(self, tree: TokenTree) -> tuple[np.ndarray, np.ndarray | None]:
        """Final normed hidden states [rows, hidden], and the features [rows, features, hidden] that
        are collected; writes to the cache after `length`."""
        model, rows = self._model, self.length + tree.depths
        context = _Rows.of(tree, model, self._cache, self.length)
        x = model.embed(tree.tokens, rows)
        inputs = model.layer_inputs(tree.tokens, x)
        streams = []
        for layer in range(model.config.num_layers):
            if layer in self._features:
                streams.append(x)
            x = model.layer(x, layer, rows, context, self._memory, inputs)
        hidden = model.norm(x, "model.norm")
        if model.config.num_layers in self._features:
            streams.append(hidden)
        return hidden, np.stack(streams, axis=1) if streams else None


_SERIAL_PRODUCT = 1 << 18  # multiplications, up to which OpenBLAS computes with one thread
_HEAD_ROWS = 8192  # of the vocabulary at a time: 128 MB at a hidden size of 4096


class ReferenceLayerStream(Arithmetic):
    """See `edge_spec.core.export.LayerStream`."""

    def __init__(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> None:
        """Raises ContextFullError for a sequence that is longer than the model's context."""
        longest = max(map(len, sequences))
        require_room(0, longest, source.config.context_length)
        super().__init__(source, longest)
        self.num_done = 0
        self._source = source
        self._observe = observe
        ends = np.cumsum([len(tokens) for tokens in sequences])
        self._spans = [
            slice(end - len(each), end) for each, end in zip(sequences, ends, strict=True)
        ]
        self._positions = np.concatenate([np.arange(len(tokens)) for tokens in sequences])
        tokens = np.concatenate(sequences)
        self._x = self.scaled(self.rows("model.embed_tokens.weight", tokens))
        self._inputs = self.layer_inputs(tokens, self._x)
        self._kept: dict[int, Heads] = {}  # of layers that later ones have keys and values from

    def weight(self, name: str) -> np.ndarray:
        return self._source.float32(name)

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        return self._source.float32_rows(name, numbers)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        if self._observe is not None:
            self._observe(name + ".weight", x)
        return super().linear(x, name)

    def advance(self) -> None:
        self._x = self.layer(self._x, self.num_done, self._positions, self, inputs=self._inputs)
        self.num_done += 1

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """rows: which of all sequences' rows -> [len(rows), vocab]."""
        hidden = self.norm(self._x[rows], "model.norm")
        if self._observe is not None:
            self._observe(self.head_name + ".weight", hidden)
        size = self.config.vocab_size
        scores = np.empty((len(hidden), size), np.float32)
        for start in range(0, size, _HEAD_ROWS):
            part = np.arange(start, min(start + _HEAD_ROWS, size))
            head = self._source.float32_rows(self.head_name + ".weight", part)
            scores[:, start : start + len(part)] = hidden @ head.T
        return self.final(scores)

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        """See `edge_spec.runtimes.reference.arithmetic.Context`."""
        found = np.zeros((self.config.num_preceding, *gated.shape), gated.dtype)
        for span in self._spans:
            for distance, before in enumerate(found, start=1):
                before[span][distance:] = gated[span][:-distance]
        return found

    def attend_to_source(self, layer: int, queries: np.ndarray) -> np.ndarray:
        source = self._kept[self.config.kv_source(layer)]
        return self.attend(layer, Heads(queries, source.keys, source.values))

    def attend(self, layer: int, heads: Heads) -> np.ndarray:
        """Some rows at a time, which attend to what stands before them: products so small that a
        matrix library takes one thread for each. With more it waits, for as long as other processes
        have a core, thousands of times."""
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
                positions = Positions(np.arange(start, end), np.arange(end))
                found = self.mix(layer, part, seen, positions)
                mixed[:, span.start + start : span.start + end] = found
        return mixed


class ReferenceModel(Arithmetic):
    """Float32 weights, read from the checkpoint when a layer is first used and then kept."""

    capabilities = Capabilities(max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True)

    def open_session(self) -> ReferenceSession | SourceSession:
        session = ReferenceSession(self)
        if self.config.encoder is None:
            return session
        return SourceSession(session, self.config.encoder, self.config.context_length)

    def prepare_sharing(self, num_sessions: int) -> int:
        return num_sessions

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """One after the other: what others are compared with."""
        return forward_one_by_one(parts)

    def close(self) -> None:
        self._weights.clear()


class ReferenceRuntime(Runtime):
    name = "reference"
    reads = "checkpoint"

    def open(self, source: Tensors, options: RuntimeOptions) -> ReferenceModel:
        # It is one thread of numpy, whatever threads are asked for.
        options.require_only(self.name, "threads", "providers", "context_length")
        others = [name for name in options.providers if name.lower() != "cpu"]
        if others:
            raise UsageError(
                f"{self.name} has no device {', '.join(others)}",
                remedy="It runs on the cpu; choose another --runtime for others.",
            )
        return ReferenceModel(source, options.context_length)

    def open_layers(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> ReferenceLayerStream:
        """See `edge_spec.core.export.StreamsLayers`."""
        return ReferenceLayerStream(source, sequences, observe)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [processor(self.name)]
