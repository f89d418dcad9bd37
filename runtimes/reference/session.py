"""One KV cache of the reference transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, require_rollback, require_room
from edge_spec.core.preceding import chain_parents
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic
from edge_spec.runtimes.reference.cache import ReferenceCache, Rows
from edge_spec.runtimes.reference.encoder import encoded


class ReferenceSession:
    def __init__(self, model: Arithmetic) -> None:
        self.length = 0
        self._model = model
        self._memory: np.ndarray | None = None  # keys and values of an encoded source
        self._features: tuple[int, ...] = ()
        self._on_prefilled: OnPrefilled | None = None
        self._cache = ReferenceCache(model)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), MAX_ROWS):
            chunk = np.asarray(tokens[start : start + MAX_ROWS])
            rows = len(chunk)
            new = Rows(np.arange(rows), np.tri(rows, dtype=bool), chain_parents(rows))
            _, features = self._hidden(chunk, new)
            start_of_chunk, self.length = self.length, self.length + rows
            if self._on_prefilled is not None and features is not None:
                self._on_prefilled(start_of_chunk, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._reserve(len(tree))
        new = Rows(tree.depths, tree.ancestors, tree.parents)
        hidden, features = self._hidden(tree.tokens, new)
        return Forward(self._model.logits(hidden), hidden, features)

    def commit(self, rows: Sequence[int]) -> None:
        self._cache.keep(rows, self.length)
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
        keys, values = self._cache.keys_and_values(layer)
        return keys[:, : self.length], values[:, : self.length]

    def attend_to(self, source: Sequence[int]) -> None:
        """See `edge_spec.core.source_session.DecoderSession`."""
        self._memory = encoded(self._model, np.asarray(source))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the state of the cache (`ReferenceCache.state`)."""
        return self._cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._cache.restore(state, length)
        self.length = length

    def close(self) -> None:
        self._cache.clear()
        self._memory = None

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._model.config.context_length)
        self._cache.reserve(self.length + rows)

    def _hidden(self, tokens: np.ndarray, new: Rows) -> tuple[np.ndarray, np.ndarray | None]:
        """Final normed hidden states [rows, hidden], and the features [rows, features, hidden] that
        are collected; writes to the cache after `length`."""
        model, rows = self._model, self.length + new.depths
        context = self._cache.after(self.length, new)
        x = model.embed(tokens, rows)
        inputs = model.layer_inputs(tokens, x)
        streams = []
        for layer in range(model.config.num_layers):
            if layer in self._features:
                streams.append(x)
            x = model.layer(x, layer, rows, context, self._memory, inputs)
        hidden = model.norm(x, "model.norm")
        if model.config.num_layers in self._features:
            streams.append(hidden)
        return hidden, np.stack(streams, axis=1) if streams else None
