"""One KV cache of the reference transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.reference.arithmetic import MAX_ROWS, Arithmetic


class ReferenceSession:
    def __init__(self, model: Arithmetic) -> None:
        config = model.config
        self.length = 0
        self._model = model
        # Layer, key or value, head, position, element; grown as needed.
        self._cache = np.zeros(
            (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim), np.float32
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        for start in range(0, len(tokens), MAX_ROWS):
            chunk = np.asarray(tokens[start : start + MAX_ROWS])
            rows = len(chunk)
            self._hidden(chunk, np.arange(rows), np.tri(rows, dtype=bool))
            self.length += rows

    def forward(self, tree: TokenTree) -> Forward:
        self._reserve(len(tree))
        hidden = self._hidden(tree.tokens, tree.depths, tree.ancestors)
        return Forward(self._model.logits(hidden), hidden)

    def commit(self, rows: Sequence[int]) -> None:
        kept = self._cache[..., self.length + np.asarray(rows), :]
        self._cache[..., self.length : self.length + len(rows), :] = kept
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length = length

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

    def _reserve(self, rows: int) -> None:
        require_room(self.length, rows, self._model.config.context_length)
        missing = self.length + rows - self._cache.shape[3]
        if missing > 0:
            room = [(0, 0)] * 5
            room[3] = (0, max(missing, 256))
            self._cache = np.pad(self._cache, room)

    def _hidden(self, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray) -> np.ndarray:
        """Final normed hidden states [rows, hidden]; writes keys and values after `length`.

        sees: [rows, rows] bool, which of the new rows each new row attends to.
        """
        model = self._model
        past = np.ones((len(tokens), self.length), bool)
        mask = np.concatenate([past, sees], axis=1)
        x = model.weight("model.embed_tokens.weight")[tokens]
        for layer in range(model.config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = model.norm(x, prefix + "input_layernorm")
            x = x + self._attention(normed, layer, self.length + depths, mask)
            normed = model.norm(x, prefix + "post_attention_layernorm")
            gate = model.linear(normed, prefix + "mlp.gate_proj")
            up = model.linear(normed, prefix + "mlp.up_proj")
            # SwiGLU (Shazeer 2020); the clip keeps exp within float32.
            swish = gate / (1 + np.exp(-np.clip(gate, -80, None)))
            x = x + model.linear(swish * up, prefix + "mlp.down_proj")
        return model.norm(x, "model.norm")

    def _attention(
        self, x: np.ndarray, layer: int, positions: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """x: [rows, hidden]; mask: [rows, length + rows]."""
        model, config = self._model, self._model.config
        rows, end = len(x), self.length + len(x)
        prefix = f"model.layers.{layer}.self_attn."

        def heads(name: str, count: int) -> np.ndarray:
            projected = model.linear(x, prefix + name + "_proj")
            split = projected.reshape(rows, count, config.head_dim).swapaxes(0, 1)
            if config.qk_norm and name in ("q", "k"):
                split = model.norm(split, prefix + name + "_norm")
            return split if name == "v" else model.rotate(split, positions)

        cache = self._cache[layer]
        cache[0, :, self.length : end] = heads("k", config.num_kv_heads)
        cache[1, :, self.length : end] = heads("v", config.num_kv_heads)
        keys, values = cache[:, :, None, :end]  # a group of query heads shares each
        groups = config.num_heads // config.num_kv_heads
        queries = heads("q", config.num_heads)
        queries = queries.reshape(config.num_kv_heads, groups, rows, config.head_dim)
        scores = queries @ keys.swapaxes(-1, -2) / np.float32(np.sqrt(config.head_dim))
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ values).reshape(config.num_heads, rows, config.head_dim)
        return model.linear(mixed.swapaxes(0, 1).reshape(rows, -1), prefix + "o_proj")
