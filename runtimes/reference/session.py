"""One KV cache of the reference transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic, Heads, Positions
from edge_spec.runtimes.reference.encoder import encoded


class ReferenceSession:
    def __init__(self, model: Arithmetic) -> None:
        config = model.config
        self.length = 0
        self._model = model
        self._memory: np.ndarray | None = None  # keys and values of an encoded source
        self._features: tuple[int, ...] = ()
        self._on_prefilled: OnPrefilled | None = None
        # Layer, key or value, head, position, element; grown as needed.
        self._cache = np.zeros(
            (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim), np.float32
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), MAX_ROWS):
            chunk = np.asarray(tokens[start : start + MAX_ROWS])
            rows = len(chunk)
            _, features = self._hidden(chunk, np.arange(rows), np.tri(rows, dtype=bool))
            start_of_chunk, self.length = self.length, self.length + rows
            if self._on_prefilled is not None and features is not None:
                self._on_prefilled(start_of_chunk, features)

    def forward(self, tree: TokenTree) -> Forward:
        self._reserve(len(tree))
        hidden, features = self._hidden(tree.tokens, tree.depths, tree.ancestors)
        return Forward(self._model.logits(hidden), hidden, features)

    def commit(self, rows: Sequence[int]) -> None:
        kept = self._cache[..., self.length + np.asarray(rows), :]
        self._cache[..., self.length : self.length + len(rows), :] = kept
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

    def attend_to(self, source: Sequence[int]) -> None:
        """See `edge_spec.core.source_session.DecoderSession`."""
        self._memory = encoded(self._model, np.asarray(source))

    def state(self) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, kv_heads, length, head_dim] float32."""
        return {"kv": self._cache[..., : self.length, :].copy()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        layers, parts, heads, _, size = self._cache.shape
        shape = (layers, parts, heads, length, size)
        require_state(state, {"kv": (shape, np.float32)}, length, self._model.config.context_length)
        self._cache, self.length = state["kv"].copy(), length

    def close(self) -> None:
        self._cache = self._cache[..., :0, :]
        self._memory = None

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._model.config.context_length)
        missing = self.length + rows - self._cache.shape[3]
        if missing > 0:
            room = [(0, 0)] * 5
            room[3] = (0, max(missing, 256))
            self._cache = np.pad(self._cache, room)

    def _hidden(
        self, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Final normed hidden states [rows, hidden], and the features [rows, features, hidden] that
        are collected; writes keys and values after `length`.

        sees: [rows, rows] bool, which of the new rows each new row attends to.
        """
        model, end = self._model, self.length + len(tokens)
        past = np.ones((len(tokens), self.length), bool)
        mask = np.concatenate([past, sees], axis=1)
        rows = self.length + depths
        positions = Positions(rows, np.concatenate([np.arange(self.length), rows]))

        def attend(layer: int, heads: Heads) -> np.ndarray:
            cache = self._cache[layer]
            cache[0, :, self.length : end] = heads.keys
            cache[1, :, self.length : end] = heads.values
            return model.mix(layer, Heads(heads.queries, *cache[:, :, :end]), mask, positions)

        x = model.embed(tokens)
        streams = []
        for layer in range(model.config.num_layers):
            if layer in self._features:
                streams.append(x)
            x = model.layer(x, layer, rows, attend, self._memory)
        hidden = model.norm(x, "model.norm")
        if model.config.num_layers in self._features:
            streams.append(hidden)
        return hidden, np.stack(streams, axis=1) if streams else None
