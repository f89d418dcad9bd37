"""Drafts with an assistant, which reads its target's own keys and values (Google 2026, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from edge_spec.core.features import SharesKeysValues
from edge_spec.core.heads import AssistantHead, AssistantLayer, TargetTables
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores
from edge_spec.drafters.heads.features import LastState, readers
from edge_spec.drafters.heads.layers import HeadNetwork
from edge_spec.drafters.protocol import TRAITS
from edge_spec.errors import UnsupportedModelError

KeysValues = Sequence[tuple[np.ndarray, np.ndarray]]  # [kv_heads, tokens, head_dim] each


class AssistantNetwork(HeadNetwork):
    kind = AssistantHead.drafted_by

    def __init__(self, head: AssistantHead, tables: TargetTables) -> None:
        super().__init__(head.config.vocab_size, head.token_ids)
        self.head = head
        self.sources = tuple(dict.fromkeys(layer.source for layer in head.layers))
        self._embed = tables.embed
        self._weights = {name: each.T for name, each in _matrices(head).items()}
        self._vectors = {n: head.tensors[n] for n in head.tensors if n.endswith(("norm", "scale"))}

    def near(self, seen: KeysValues, position: int) -> KeysValues:
        """Return the float32 keys and values that a row at this position sees in each layer. seen:
        those of each of `sources`."""
        by_source = dict(zip(self.sources, seen, strict=True))
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for layer in self.head.layers:  # layers of a source share the window
            if layer.source not in found:
                window = layer.kind.window or position + 1
                first = max(position + 1 - window, 0)
                keys, values = (
                    np.ascontiguousarray(each[:, first:position], np.float32)
                    for each in by_source[layer.source]
                )
                found[layer.source] = keys, values
        return [found[layer.source] for layer in self.head.layers]

    def draft(
        self, tokens: np.ndarray, states: np.ndarray, position: int, near: KeysValues
    ) -> RowScores:
        """Score one row; the next row continues from the returned state. tokens: [1], the pending
        token or its successor. states: [1, target_size] of the token before. near: from `near`."""
        embedded = self._embed(tokens) * np.float32(self.head.embedding_scale)
        # Numpy's threads would wait for the target's, which still hold the cores.
        with _blas().limit(limits=1, user_api="blas"):
            stream = self._multiply("pre", np.concatenate([embedded, states], axis=1))
            for index, (layer, seen) in enumerate(zip(self.head.layers, near, strict=True)):
                stream = self._layer(stream, index, layer, position, seen)
            normed = self._normed(stream, "norm")
            scores, ids = self._scored(normed)
            return RowScores(scores[0], ids[0], state=self._multiply("post", normed)[0])

    def _layer(
        self,
        stream: np.ndarray,
        index: int,
        layer: AssistantLayer,
        position: int,
        seen: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        prefix = f"layers.{index}."
        queries = self._multiply(prefix + "q", self._normed(stream, prefix + "input_norm"))
        queries = queries.reshape(len(stream), -1, layer.head_dim).swapaxes(0, 1)
        queries = self._normed(queries, prefix + "q_norm")
        mixed = _attend(_rotate(queries, position * _frequencies(layer)), *seen)
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        attended = self._multiply(prefix + "o", beside)
        stream = stream + self._normed(attended, prefix + "attended_norm")
        read = self._normed(stream, prefix + "mlp_norm")
        gate, up = np.split(self._multiply(prefix + "gate_up", read), 2, axis=1)
        added = self._multiply(prefix + "down", _gelu(gate) * up)
        stream = stream + self._normed(added, prefix + "added_norm")
        scaled: np.ndarray = stream * self._vectors[prefix + "scale"]
        return scaled

    def _multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        product: np.ndarray = x @ self._weights[name]
        return product

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.head.config.norm_epsilon)
        normed: np.ndarray = x * scale.astype(np.float32) * self._vectors[name]
        return normed

    def _scored(self, normed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centroids, rows = self.head.centroids, self.head.output_rows
        if centroids is None:
            scores = self._multiply("head", normed)
            ids = np.arange(scores.shape[1]) if self.token_ids is None else self.token_ids
            return scores, np.broadcast_to(ids, scores.shape)
        assert rows is not None
        found = self._multiply("centroids", normed)
        least = found.shape[1] - centroids.num_active
        active = np.argpartition(found, least, axis=1)[:, least:]
        tokens = centroids.ordering[active].reshape(len(normed), -1)
        each = [rows(ids) @ row for ids, row in zip(tokens, normed, strict=True)]
        return np.stack(each), tokens


def _matrices(head: AssistantHead) -> dict[str, np.ndarray]:
    """Return an assistant's matrices, without the rows that clusters choose."""
    joined = {"pre": ["pre"], "post": ["post"]}
    for prefix in (f"layers.{layer}." for layer in range(len(head.layers))):
        joined |= {prefix + name: [prefix + name] for name in ("q", "o", "down")}
        joined[prefix + "gate_up"] = [prefix + "gate", prefix + "up"]
    matrices = {
        name: np.concatenate([head.tensors[each + ".weight"] for each in parts])
        for name, parts in joined.items()
    }
    if head.centroids is not None:
        return matrices | {"centroids": head.centroids.weight}
    assert head.output_rows is not None
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    return matrices | {"head": head.output_rows(ids)}


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate x: [heads, rows, head_dim], halves paired (Su et al. 2021). angles: [head_dim / 2]."""
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return softmax attention to all keys, unscaled; [query heads, rows, head_dim]."""
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    scores = grouped @ keys[:, None].swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = (weights @ values[:, None]).reshape(queries.shape)
    return mixed


def _gelu(gate: np.ndarray) -> np.ndarray:
    """Return GELU by the tanh approximation (Hendrycks and Gimpel 2016)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


@cache
def _blas() -> Any:
    """Return a cached controller, since making one scans all loaded libraries."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@cache
def _frequencies(layer: AssistantLayer) -> np.ndarray:
    assert layer.kind.rope is not None
    return layer.kind.rope.frequencies(layer.head_dim)


class TargetCache(LastState):
    """The target's keys and values of the text, and its last state."""

    near: KeysValues = ()  # what rows see in this round
    num_tokens = 0

    def __init__(self, network: AssistantNetwork) -> None:
        self._network = network
        self._session: SharesKeysValues | None = None

    @property
    def is_ready(self) -> bool:
        if self.state is None or self._session is None:
            return False
        position = self.num_tokens - 1
        found = [self._session.keys_values(layer) for layer in self._network.sources]
        seen = [each for each in found if each is not None and each[0].shape[1] >= position]
        if len(seen) < len(found):
            return False
        self.near = self._network.near(seen, position)
        return True

    def attach(self, session: Session, drafter: str) -> None:
        """Raise UnsupportedModelError if the runtime does not share keys and values."""
        if not isinstance(session, SharesKeysValues):
            raise UnsupportedModelError(
                f"the drafter {drafter} reads the target's own keys and values, which this "
                "runtime does not share",
                remedy="Use --runtime ort, or another drafter.",
            )
        session.share_keys_values(self._network.sources)
        self._session, readers[session], self.state = session, self, None

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.num_tokens = len(prompt)

    def observe(self, out: Forward, verdict: Verdict) -> None:
        super().observe(out, verdict)
        self.num_tokens += len(verdict.tokens)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and readers.get(session) is self:
            session.share_keys_values(())


class AssistantDrafter(HeadDrafter):
    """Drafts with an assistant, whose network conversations may share. Drafts nothing in an
    answer's first round, when no state is known yet."""

    traits = TRAITS["assistant"]
    _target: TargetCache

    def __init__(self, network: AssistantNetwork) -> None:
        super().__init__(network, TargetCache(network))
        self._network = network

    def _score(self, path: Path) -> RowScores:
        state = self._row(path[:-1]).state if path else self._target.state
        assert state is not None
        token, position = np.array([path[-1] if path else self._pending]), self._target.num_tokens
        return self._network.draft(token, state.reshape(1, -1), position - 1, self._target.near)
