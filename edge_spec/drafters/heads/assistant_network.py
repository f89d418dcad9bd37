"""An assistant's weights, and what computes with them (Google 2026, Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from edge_spec.core.assistant import AssistantHead, AssistantLayer
from edge_spec.core.heads import HeadMatrix, TargetTables
from edge_spec.drafters.draft.candidates import ranked
from edge_spec.drafters.heads.layers import (
    FloatProducts,
    Heads,
    attend,
    one_blas_thread,
    output_matrix,
    own_matrix,
    rms_normed,
)

KeysValues = Sequence[tuple[np.ndarray, np.ndarray]]  # [kv_heads, tokens, head_dim] each


class Drafted(NamedTuple):
    """What an assistant makes of rows: scores and the tokens that they are of, [rows, scored]
    each, and the states that the next rows go on from, [rows, target_size]."""

    scores: np.ndarray
    tokens: np.ndarray
    states: np.ndarray


class AssistantNetwork:
    """It keeps no text. tables: the target's."""

    kind = AssistantHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, head: AssistantHead, tables: TargetTables) -> None:
        self.head = head
        self.sources = tuple(dict.fromkeys(layer.source for layer in head.layers))
        self._embed = tables.embed
        matrices = assistant_matrices(head)
        self._products = FloatProducts(matrices)
        self._vectors = {n: head.tensors[n] for n in head.tensors if n.endswith(("norm", "scale"))}

    def near(self, seen: KeysValues, position: int) -> KeysValues:
        """Returns the keys and values that a row at this position sees in each layer, in float32.
        seen: those of each of `sources`."""
        by_source = dict(zip(self.sources, seen, strict=True))
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for layer in self.head.layers:  # those of a source have the same window
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
    ) -> Drafted:
        """tokens: [rows], which all stand in the place of the pending one. states: [rows,
        target_size], that came with the tokens before them. near: as `near` returns them."""
        embedded = self._embed(tokens) * np.float32(self.head.embedding_scale)
        stream = self._products("pre", np.concatenate([embedded, states], axis=1))
        for index, (layer, seen) in enumerate(zip(self.head.layers, near, strict=True)):
            stream = self._layer(stream, index, layer, position, seen)
        normed = self._normed(stream, "norm")
        return Drafted(*self._scored(normed), self._products("post", normed))

    def spread(self, scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[vocab of the target] float32 of one row; tokens that it does not score have -inf."""
        spread = np.full(self.head.config.vocab_size, -np.inf, np.float32)
        spread[tokens] = scores
        return spread

    def likeliest(self, scores: np.ndarray, tokens: np.ndarray) -> list[tuple[int, int]]:
        """(token, kind of draft token) of one row, in falling order. Raises ValueError for scores
        that no choice can be made by."""
        peak = scores.max()
        if not np.isfinite(peak):  # NaN, where any of them is
            raise ValueError("logits that are not finite")
        return [(int(tokens[at]), kind) for at, kind in ranked(np.exp(scores - peak))]

    def _layer(
        self,
        stream: np.ndarray,
        index: int,
        layer: AssistantLayer,
        position: int,
        seen: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        prefix = f"layers.{index}."
        queries = self._products(prefix + "q", self._normed(stream, prefix + "input_norm"))
        queries = queries.reshape(len(stream), -1, layer.head_dim).swapaxes(0, 1)
        queries = _turned(self._normed(queries, prefix + "q_norm"), layer, position)
        # `attend` divides by the root of a head's size, which queries here are not.
        queries = queries * np.float32(np.sqrt(layer.head_dim))
        mixed = attend(Heads(queries, *seen), None)
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        attended = self._products(prefix + "o", beside)
        stream = stream + self._normed(attended, prefix + "attended_norm")
        read = self._normed(stream, prefix + "mlp_norm")
        gate, up = np.split(self._products(prefix + "gate_up", read), 2, axis=1)
        added = self._products(prefix + "down", _gelu(gate) * up)
        stream = stream + self._normed(added, prefix + "added_norm")
        scaled: np.ndarray = stream * self._vectors[prefix + "scale"]
        return scaled

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_normed(x, self._vectors[name], self.head.config.norm_epsilon)

    def _scored(self, normed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centroids, rows = self.head.centroids, self.head.output_rows
        if centroids is None:
            scores = self._products("head", normed)
            ids = self.head.token_ids
            ids = np.arange(scores.shape[1]) if ids is None else ids
            return scores, np.broadcast_to(ids, scores.shape)
        assert rows is not None
        found = self._products("centroids", normed)
        least = found.shape[1] - centroids.num_active
        active = np.argpartition(found, least, axis=1)[:, least:]
        tokens = centroids.ordering[active].reshape(len(normed), -1)
        with one_blas_thread():  # as other products between passes of the target
            each = [rows(ids) @ row for ids, row in zip(tokens, normed, strict=True)]
        return np.stack(each), tokens


def assistant_matrices(head: AssistantHead) -> dict[str, HeadMatrix]:
    """Returns what an assistant multiplies with, but for the rows that clusters choose."""
    matrices = {name: own_matrix(head.tensors, [name]) for name in ("pre", "post")}
    for layer in range(len(head.layers)):
        prefix = f"layers.{layer}."
        joined = {"q": ["q"], "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}
        matrices |= {
            prefix + name: own_matrix(head.tensors, [prefix + each for each in parts])
            for name, parts in joined.items()
        }
    if head.centroids is not None:
        weight = head.centroids.weight
        return matrices | {"centroids": HeadMatrix((partial(np.asarray, weight),))}
    assert head.output_rows is not None
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    return matrices | {"head": output_matrix(head.output_rows, ids)}


def _turned(x: np.ndarray, layer: AssistantLayer, position: int) -> np.ndarray:
    """x: [heads, rows, head_dim], halves paired (Su et al. 2021)."""
    angles = position * _frequencies(layer)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the tangent."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


@cache
def _frequencies(layer: AssistantLayer) -> np.ndarray:
    assert layer.kind.rope is not None
    return layer.kind.rope.frequencies(layer.head_dim)
