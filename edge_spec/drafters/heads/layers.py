"""Networks of trained heads: the matrices that a backend multiplies with, what EAGLE heads read of
tokens, and what assistants compute in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.heads import DFlashHead, EagleHead, HeadBackend, HeadMatrix, TargetTables

_QUERY_GATE = "q_gate"  # within names
_FEW_ROWS = 16
_ROWS_AT_ONCE = 16384  # of an output matrix, which are read in float32


def matrices_of(head: EagleHead | DFlashHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """Returns what a head multiplies with; matrices that read the same are one, and a gate of what
    attention mixes stands below queries, keys and values. The last one is its own output matrix,
    else the target's."""
    tensors, joined = head.tensors, {"fc": ["fc"]}
    experts = head.experts if isinstance(head, EagleHead) else None
    for prefix in (f"layers.{layer}." for layer in range(head.config.num_layers)):
        gated = [_QUERY_GATE] if f"{prefix}{_QUERY_GATE}.weight" in tensors else []
        own = {"qkv": [*"qkv", *gated], "o": ["o"], "gate_up": ["gate", "up"], "down": ["down"]}
        if experts is not None:
            own |= {"router": ["router"], "shared_gate": ["shared_gate"]}
            for each in (f"experts.{expert}." for expert in range(experts.count)):
                own[each + "gate_up"] = [each + "gate", each + "up"]
                own[each + "down"] = [each + "down"]
        joined |= {prefix + name: [prefix + each for each in own[name]] for name in own}
    matrices = {name: own_matrix(tensors, names) for name, names in joined.items()}
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    if head.head_rows is None:
        return matrices | {"head": output_matrix(tables.output_rows, ids)}
    return matrices | {"head": output_matrix(head.head_rows, np.arange(len(ids)))}


def own_matrix(tensors: Mapping[str, np.ndarray], names: list[str]) -> HeadMatrix:
    """Joins tensors of the head, whose rows follow each other."""
    parts = tuple(partial(tensors.__getitem__, name + ".weight") for name in names)
    biases = [tensors[name + ".bias"] for name in names if name + ".bias" in tensors]
    return HeadMatrix(parts, np.concatenate(biases) if biases else None)


def output_matrix(read: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> HeadMatrix:
    """Returns these rows of an output matrix, which are read in parts."""
    parts = [rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE)]
    return HeadMatrix(tuple(partial(read, part) for part in parts), is_output=True)


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


class EagleNetwork(LayersNetwork):
    """backend: what computes its steps."""

    kind = EagleHead.drafted_by

    def __init__(self, head: EagleHead, tables: TargetTables, backend: HeadBackend) -> None:
        super().__init__(head, tables)
        self.window, self.masks = head.window, head.masks
        self.bound_to = backend(head, matrices_of(head, tables)).bound_to
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]. Few tokens are mostly those of a moment ago: they are remembered."""
        if len(tokens) > _FEW_ROWS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])


def one_blas_thread() -> AbstractContextManager[Any]:
    """Inside, products of numpy are computed by the thread that asks for them: between a target's
    passes, which have few rows, numpy's others would wait for the target's, which still hold the
    cores. What they are elsewhere comes back at the end; it takes some microseconds."""
    limited: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limited


@cache
def _controller() -> Any:
    """Made once: it looks through all libraries that are loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class FloatProducts:
    """Multiplies with matrices in float32, of an assistant, which numpy computes."""

    def __init__(self, matrices: Mapping[str, HeadMatrix]) -> None:
        self._weights = {
            name: np.concatenate([read() for read in each.parts]).T
            for name, each in matrices.items()
        }

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        """x: [rows, in] float32 -> [rows, out] float32."""
        with one_blas_thread():
            product: np.ndarray = x @ self._weights[name]
        return product


class Heads(NamedTuple):
    """[heads, rows, head_dim] each; groups of queries share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def attend(heads: Heads) -> np.ndarray:
    """Softmax attention to all keys, of scores as they are; [query heads, rows, head_dim]."""
    queries, keys, values = heads
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    with one_blas_thread():
        scores = grouped @ keys[:, None].swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: np.ndarray = (weights @ values[:, None]).reshape(queries.shape)
    return mixed


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x: [heads, rows, head_dim], halves paired (Su et al. 2021). angles: [head_dim / 2]."""
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    normed: np.ndarray = x * scale.astype(np.float32) * weight
    return normed
