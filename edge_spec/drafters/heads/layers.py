"""Networks of trained heads: their matrices for a backend, and what EAGLE heads read of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from edge_spec.core.heads import DFlashHead, EagleHead, HeadBackend, HeadMatrix, TargetTables

_QUERY_GATE = "q_gate"  # in names
_FEW_ROWS = 16
_ROWS_AT_ONCE = 16384  # of an output matrix, read in float32


def matrices_of(head: EagleHead | DFlashHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """Return a head's matrices, joining those with the same input. A query gate is stacked below
    queries, keys and values. The output matrix, last, is the head's own or else the target's."""
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
    matrices = {name: _joined(tensors, names) for name, names in joined.items()}
    ids = np.arange(head.config.vocab_size) if head.token_ids is None else head.token_ids
    if head.head_rows is None:
        return matrices | {"head": _output_matrix(tables.output_rows, ids)}
    return matrices | {"head": _output_matrix(head.head_rows, np.arange(len(ids)))}


def _joined(tensors: Mapping[str, np.ndarray], names: list[str]) -> HeadMatrix:
    """Join tensors row-wise."""
    parts = tuple(partial(tensors.__getitem__, name + ".weight") for name in names)
    biases = [tensors[name + ".bias"] for name in names if name + ".bias" in tensors]
    return HeadMatrix(parts, np.concatenate(biases) if biases else None)


def _output_matrix(read: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> HeadMatrix:
    """Return these rows of an output matrix, to be read in parts."""
    parts = [rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE)]
    return HeadMatrix(tuple(partial(read, part) for part in parts), is_output=True)


class HeadNetwork:
    """Weights of a head, which hold no text. token_ids: [scored tokens] of the target; None:
    all."""

    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, vocab_size: int, token_ids: np.ndarray | None) -> None:
        self.vocab_size = vocab_size  # of the target
        self.token_ids = token_ids


_KEPT_ROWS = 2048  # embeddings: 32 MB for the widest heads


class LayersNetwork(HeadNetwork):
    """A head whose layers read the target's features."""

    def __init__(
        self, head: EagleHead | DFlashHead, tables: TargetTables, backend: HeadBackend
    ) -> None:
        super().__init__(head.config.vocab_size, head.token_ids)
        self.head, self.kind, self.config = head, head.drafted_by, head.config
        self.feature_layers: Sequence[int] = head.feature_layers
        self.features_size = len(head.feature_layers) * head.feature_size
        self.bound_to = backend(head, matrices_of(head, tables)).bound_to
        self._embed = head.embed_rows or tables.embed
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Return [rows, hidden_size]. Few tokens are mostly recent ones, so those are cached."""
        if not 0 < len(tokens) <= _FEW_ROWS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])
