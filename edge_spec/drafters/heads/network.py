"""An EAGLE head's weights, and what computes with them: its backend's step, or the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from edge_spec.core.heads import (
    BindsCaches,
    EagleHead,
    EagleStep,
    HeadBackend,
    HeadMatrix,
    TargetTables,
)
from edge_spec.drafters.draft.candidates import ranked
from edge_spec.drafters.heads.float_products import FloatProducts
from edge_spec.drafters.heads.formulas import EagleFormulas
from edge_spec.drafters.heads.layers import (
    FEW_ROWS,
    layer_matrices,
    own_matrix,
    targets_output,
)

_KEPT_ROWS = 2048  # of an embedding: 32 MB of the widest heads


class EagleNetwork:
    """It keeps no text. tables: the target's. backend: what computes its steps; by default numpy
    does, in float32."""

    kind = EagleHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(
        self, head: EagleHead, tables: TargetTables, backend: HeadBackend | None = None
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self.window = head.window
        self.num_scored = head.config.vocab_size if head.token_ids is None else len(head.token_ids)
        self._head = head
        matrices = eagle_matrices(head, tables)
        self._step: BindsCaches = (
            EagleFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.eagle_step(head, matrices)
        )
        self._embed = head.embed_rows or tables.embed
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))

    @property
    def features_size(self) -> int:
        """Counts the numbers of all features of a token beside each other."""
        return len(self.feature_layers) * self._head.feature_size

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]. Few tokens are mostly those of a moment ago: they are remembered."""
        if len(tokens) > FEW_ROWS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])

    def bound_to(self, cache: np.ndarray) -> EagleStep:
        """See BindsCaches."""
        return self._step.bound_to(cache)

    def likeliest(self, scores: np.ndarray) -> list[tuple[int, int]]:
        """scores: [num_scored] of a row. (token of the target, kind of draft token), in falling
        order. Raises ValueError for scores that no choice can be made by."""
        peak = scores.max()
        if not np.isfinite(peak):  # NaN, where any of them is
            raise ValueError("logits that are not finite")
        found = ranked(np.exp(scores - peak))
        ids = self._head.token_ids
        return found if ids is None else [(int(ids[token]), kind) for token, kind in found]

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """scores: [rows, num_scored] -> [rows, vocab of the target] float32; tokens that it does
        not score have -inf."""
        if self._head.token_ids is None:
            return scores
        spread = np.full((len(scores), self.config.vocab_size), -np.inf, np.float32)
        spread[:, self._head.token_ids] = scores
        return spread


def eagle_matrices(head: EagleHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """Returns what a head multiplies with; matrices that read the same are one."""
    matrices = {"fc": own_matrix(head.tensors, ["fc"])}
    for layer in range(head.config.num_layers):
        matrices |= layer_matrices(head.tensors, f"layers.{layer}.")
    if "head" in head.tensors:
        parts: tuple[Callable[[], np.ndarray], ...] = (partial(head.tensors.__getitem__, "head"),)
        return matrices | {"head": HeadMatrix(parts, is_output=True)}
    return matrices | {"head": targets_output(tables, head.token_ids, head.config.vocab_size)}
