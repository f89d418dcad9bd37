"""Computes what the layers of trained heads do of whatever they read: their formulas are
those of Llama and Qwen3, in float32. An EAGLE head's backend may take steps in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import (
    BindsCaches,
    DFlashHead,
    EagleHead,
    EagleStep,
    EntryRows,
    HeadBackend,
    HeadExperts,
    HeadMatrix,
    TargetTables,
)
from edge_spec.core.rope import Rope

QUERY_GATE, EXPERTS = "q_gate", ".experts."  # within names
FEW_ROWS = 16
_SHORT = 512  # keys, up to which numpy takes one thread by itself
_ROWS_AT_ONCE = 16384  # of an output matrix, which are read in float32
_FEW_ROWS = 64


def one_blas_thread() -> AbstractContextManager[Any]:
    """Inside, products of numpy are computed by the thread that asks for them. What they are
    elsewhere comes back at the end; it takes some microseconds."""
    limited: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limited


@cache
def _controller() -> Any:
    """Made once: it looks through all libraries that are loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class Heads(NamedTuple):
    """[heads, rows, head_dim] each; groups of queries share keys. gates: [query heads, rows,
    head_dim], what the mixed values are multiplied with; None: nothing."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    gates: np.ndarray | None = None


class HeadLayers:
    """products: with a head's matrices, by the names of `layer_matrices`; its vectors are read from
    `tensors`, of which norms may be missing."""

    def __init__(
        self,
        config: ModelConfig,
        products: FloatProducts,
        tensors: Mapping[str, np.ndarray],
        experts: HeadExperts | None = None,
    ) -> None:
        self._config, self._experts = config, experts
        self._products = products
        self._norms = {name: tensors[name] for name in tensors if "norm" in name}
        scaling = config.rope_scaling
        self._frequencies = Rope(config.rope_theta, scaling).frequencies(config.rotated)
        self._magnitude = 1.0 if scaling is None else scaling.magnitude

    def heads(self, read: np.ndarray, layer: int, positions: np.ndarray) -> Heads:
        """Makes the heads of what attention reads, [rows, in]."""
        config, prefix = self._config, f"layers.{layer}."
        found = self._split(self._products(prefix + "qkv", read))
        ends = np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        queries, keys, values, gates = np.split(found, ends)
        queries = self.normed(queries, prefix + "q_norm")
        keys = self.normed(keys, prefix + "k_norm")
        angles = positions[:, None] * self._frequencies[None]
        turned = rotate(np.concatenate([queries, keys]), angles, self._magnitude)
        opened = logistic(gates) if len(gates) else None
        return Heads(turned[: ends[0]], turned[ends[0] :], values, opened)

    def leave(self, stream: np.ndarray, mixed: np.ndarray, layer: int) -> np.ndarray:
        """The stream after a layer whose attention has mixed [query heads, rows, head_dim]."""
        prefix = f"layers.{layer}."
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        stream = stream + self._products(prefix + "o", beside)
        read = self.normed(stream, prefix + "post_norm")
        added = self._mlp(read, prefix)
        if self._experts is not None:
            shared = self._products(prefix + "shared_gate", read)
            added = added * logistic(shared)
            added += self._mixture(read, prefix, self._experts.used)
        left: np.ndarray = stream + added
        return left

    def _mlp(self, read: np.ndarray, prefix: str) -> np.ndarray:
        gate, up = np.split(self._products(prefix + "gate_up", read), 2, axis=1)
        gated = gate * logistic(gate) * up
        return self._products(prefix + "down", gated)

    def _mixture(self, read: np.ndarray, prefix: str, used: int) -> np.ndarray:
        """Adds what the experts of each row add, by a softmax of their scores."""
        scores = self._products(prefix + "router", read)
        taken = np.argsort(-scores, axis=1, kind="stable")[:, :used]
        scores = np.take_along_axis(scores, taken, axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        added = np.zeros_like(read)
        for expert in np.unique(taken):
            rows, places = np.nonzero(taken == expert)
            own = self._mlp(read[rows], f"{prefix}experts.{expert}.")
            added[rows] += weights[rows, places, None] * own
        return added

    def normed(self, x: np.ndarray, name: str) -> np.ndarray:
        """Root mean square normalization, or nothing where the head has no such norm."""
        weight = self._norms.get(name)
        return x if weight is None else rms_normed(x, weight, self._config.norm_epsilon)

    def keys_values(
        self, read: np.ndarray, layer: int, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[heads, rows, head_dim] each, of a row that asks nothing."""
        made = self.heads(read, layer, positions)
        return made.keys, made.values

    def _split(self, rows: np.ndarray) -> np.ndarray:
        """[rows, heads * head_dim] -> [heads, rows, head_dim]."""
        head_dim = self._config.head_dim
        # Of no rows, numpy could not tell how many heads there are.
        return rows.reshape(len(rows), rows.shape[1] // head_dim, head_dim).swapaxes(0, 1)


def layer_matrices(
    tensors: Mapping[str, np.ndarray], prefix: str, experts: HeadExperts | None = None
) -> dict[str, HeadMatrix]:
    """A gate of what attention mixes stands below queries, keys and values."""
    gated = [QUERY_GATE] if f"{prefix}{QUERY_GATE}.weight" in tensors else []
    joined: dict[str, Iterable[str]]
    joined = {"qkv": [*"qkv", *gated], "o": "o", "gate_up": ("gate", "up"), "down": ("down",)}
    if experts is not None:
        joined |= {"router": ("router",), "shared_gate": ("shared_gate",)}
        for each in (f"experts.{expert}." for expert in range(experts.count)):
            joined |= {
                each + "gate_up": (each + "gate", each + "up"),
                each + "down": [each + "down"],
            }
    return {
        prefix + name: own_matrix(tensors, [prefix + each for each in parts])
        for name, parts in joined.items()
    }


def matrices_of(head: EagleHead | DFlashHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """Returns what a head multiplies with; matrices that read the same are one. The last one is its
    own output matrix, else the target's."""
    experts = head.experts if isinstance(head, EagleHead) else None
    matrices = {"fc": own_matrix(head.tensors, ["fc"])}
    for layer in range(head.config.num_layers):
        matrices |= layer_matrices(head.tensors, f"layers.{layer}.", experts)
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    own = head.head_rows
    scored = (
        output_matrix(tables.output_rows, ids)
        if own is None
        else output_matrix(own, np.arange(len(ids)))
    )
    return matrices | {"head": scored}


def own_matrix(tensors: Mapping[str, np.ndarray], names: list[str]) -> HeadMatrix:
    """Joins tensors of the head, whose rows follow each other."""
    parts = tuple(partial(tensors.__getitem__, name + ".weight") for name in names)
    biases = [tensors[name + ".bias"] for name in names if name + ".bias" in tensors]
    return HeadMatrix(parts, np.concatenate(biases) if biases else None)


def output_matrix(read: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> HeadMatrix:
    """Returns these rows of an output matrix, which are read in parts."""
    parts = [rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE)]
    return HeadMatrix(tuple(partial(read, part) for part in parts), is_output=True)


def logistic(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-np.clip(x, -80, None)))
    return found


def rotate(x: np.ndarray, angles: np.ndarray, magnitude: float = 1.0) -> np.ndarray:
    """x: [heads, rows, head_dim], of which the first 2 * len(angles) numbers are rotated, halves
    paired (Su et al. 2021). angles: [rows or nothing, pairs]."""
    cos = (np.cos(angles) * magnitude).astype(np.float32)
    sin = (np.sin(angles) * magnitude).astype(np.float32)
    pairs = angles.shape[-1]
    first, second, rest = np.split(x, [pairs, 2 * pairs], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rms_normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    normed: np.ndarray = x * scale.astype(np.float32) * weight
    return normed


def attend(heads: Heads, sees: np.ndarray | None) -> np.ndarray:
    """Softmax attention, gated where there are gates; sees: [rows, keys] bool, at least one key a
    row; None: all. Returns [query heads, rows, head_dim]."""
    queries, keys, values, gates = heads
    is_short = len(queries[0]) > FEW_ROWS or keys.shape[1] <= _SHORT
    with nullcontext() if is_short else one_blas_thread():
        mixed = _attended(queries, keys, values, sees)
    return mixed if gates is None else mixed * gates


def _attended(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, sees: np.ndarray | None
) -> np.ndarray:
    scaled = queries * np.float32(1 / np.sqrt(queries.shape[-1]))
    grouped = scaled.reshape(len(keys), -1, *queries.shape[1:])
    scores = grouped @ keys[:, None].swapaxes(-1, -2)
    if sees is not None:
        scores = np.where(sees, scores, -np.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = (weights @ values[:, None]).reshape(queries.shape)
    return mixed


class FloatProducts:
    """Keeps all matrices in float32, those of experts from their first use on. Between a target's
    passes, which have few rows, one thread computes them: numpy's others would wait for the
    target's, which still hold the cores."""

    def __init__(self, matrices: Mapping[str, HeadMatrix]) -> None:
        self._matrices = matrices
        self._weights = {n: _whole(each).T for n, each in matrices.items() if EXPERTS not in n}
        self._biases = {name: matrix.bias for name, matrix in matrices.items()}

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        """x: [rows, in] float32 -> [rows, out] float32, the bias added."""
        bias = self._biases[name]
        if name not in self._weights:
            self._weights[name] = _whole(self._matrices[name]).T
        with one_blas_thread() if len(x) <= _FEW_ROWS else nullcontext():
            product: np.ndarray = x @ self._weights[name]
        return product if bias is None else product + bias


def _whole(matrix: HeadMatrix) -> np.ndarray:
    parts = [read() for read in matrix.parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class HeadNetwork:
    """What the weights of heads have in common, which keep no text. token_ids: [scored tokens] of
    the target; None: it scores all of them."""

    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, vocab_size: int, token_ids: np.ndarray | None) -> None:
        self.vocab_size = vocab_size  # of the target
        self.token_ids = token_ids


class LayersNetwork(HeadNetwork):
    """Of a head whose layers read the target's features. tables: the target's."""

    def __init__(self, head: EagleHead | DFlashHead, tables: TargetTables) -> None:
        super().__init__(head.config.vocab_size, head.token_ids)
        self.config = head.config
        self.feature_layers: Sequence[int] = head.feature_layers
        self.features_size = len(head.feature_layers) * head.feature_size
        self._embed = head.embed_rows or tables.embed


_KEPT_ROWS = 2048  # of an embedding: 32 MB of the widest heads


class EagleFormulas:
    """Drafts where there is no backend; the steps of backends are compared with it."""

    def __init__(self, head: EagleHead, products: FloatProducts) -> None:
        self._num_layers = head.config.num_layers
        self._head = head
        self._layers = HeadLayers(head.config, products, head.tensors, head.experts)
        self._products = products

    def bound_to(self, cache: np.ndarray) -> EagleStep:
        """See core.heads.BindsCaches."""
        return lambda rows: self._entries(rows, cache)

    def known(self, found: np.ndarray) -> np.ndarray:
        """found: [rows, features_size] -> [rows, hidden_size], what a token's features enter as."""
        if self._head.joins_embedding:
            return found
        parts = [
            self._layers.normed(each, f"feature_norm.{index}")
            for index, each in enumerate(np.split(found, len(self._head.feature_layers), axis=1))
        ]
        return self._products("fc", self._layers.normed(np.concatenate(parts, axis=1), "fc_norm"))

    def enter(self, embedded: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the first layer adds to, [rows, hidden_size], and its attention reads."""
        if self._head.joins_embedding:
            embedded = self._layers.normed(embedded, "embed_norm")
            features = self._layers.normed(features, "state_norm")
            stream = self._products("fc", np.concatenate([embedded, features], axis=1))
            return stream, self._layers.normed(stream, "layers.0.input_norm")
        normed = self._layers.normed(features, "layers.0.hidden_norm")
        beside = [self._layers.normed(embedded, "layers.0.input_norm"), normed]
        return normed if self._head.adds_to_normed else features, np.concatenate(beside, axis=1)

    def goes_on_from(self, stream: np.ndarray) -> np.ndarray:
        """Returns what takes the place of features [rows, hidden_size] that the target has not
        computed."""
        return self._layers.normed(stream, "norm") if self._head.returns_normed else stream

    def logits(self, stream: np.ndarray) -> np.ndarray:
        """[rows, scored tokens] float32."""
        return self._products("head", self._layers.normed(stream, "norm"))

    def _entries(self, rows: EntryRows, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See EagleStep."""
        layers, end = self._layers, rows.start + len(rows.positions)
        features = np.concatenate([self.known(rows.found), rows.states])[rows.order]
        stream, read = self.enter(rows.embedded, features)
        for layer in range(self._num_layers):
            if layer:
                read = layers.normed(stream, f"layers.{layer}.input_norm")
            made = layers.heads(read, layer, rows.positions)
            keys, values = cache[layer]
            keys[:, rows.start : end], values[:, rows.start : end] = made.keys, made.values
            mixed = attend(made._replace(keys=keys[:, :end], values=values[:, :end]), rows.sees)
            stream = layers.leave(stream, mixed, layer)
        return self.goes_on_from(stream), self.logits(stream[rows.scored])


class EagleNetwork(LayersNetwork):
    """backend: what computes its steps; by default numpy does, in float32."""

    kind = EagleHead.drafted_by

    def __init__(
        self, head: EagleHead, tables: TargetTables, backend: HeadBackend | None = None
    ) -> None:
        super().__init__(head, tables)
        self.window, self.masks = head.window, head.masks
        matrices = matrices_of(head, tables)
        step: BindsCaches = (
            EagleFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.eagle_step(head, matrices)
        )
        self.bound_to = step.bound_to
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]. Few tokens are mostly those of a moment ago: they are remembered."""
        if len(tokens) > FEW_ROWS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])
