"""An EAGLE head's weights, and what computes with them: its backend's step, or the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from edge_spec.core.heads import (
    BindsCaches,
    EagleHead,
    EagleStep,
    EntryRows,
    HeadBackend,
    HeadMatrix,
    TargetTables,
)
from edge_spec.drafters.draft.draft_tree import ranked
from edge_spec.drafters.heads.layers import (
    FEW_ROWS,
    FloatProducts,
    HeadLayers,
    attend,
    layer_matrices,
    own_matrix,
    scored_matrix,
    spread,
)

_KEPT_ROWS = 2048  # of an embedding: 32 MB of the widest heads


class EagleFormulas:
    """Drafts where there is no backend; the steps of backends are compared with it."""

    def __init__(self, head: EagleHead, products: FloatProducts) -> None:
        self.num_layers = head.config.num_layers
        self._head = head
        self._layers = HeadLayers(head.config, products, head.tensors, head.experts)
        self._products = products

    def bound_to(self, cache: np.ndarray) -> EagleStep:
        """See core.heads.BindsCaches."""
        return _FormulaStep(self, self._layers, cache)

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


class _FormulaStep:
    def __init__(self, formulas: EagleFormulas, layers: HeadLayers, cache: np.ndarray) -> None:
        self._formulas, self._layers, self._cache = formulas, layers, cache

    def __call__(self, rows: EntryRows) -> tuple[np.ndarray, np.ndarray]:
        formulas, layers = self._formulas, self._layers
        end = rows.start + len(rows.positions)
        features = np.concatenate([formulas.known(rows.found), rows.states])[rows.order]
        stream, read = formulas.enter(rows.embedded, features)
        for layer in range(formulas.num_layers):
            if layer:
                read = layers.normed(stream, f"layers.{layer}.input_norm")
            made = layers.heads(read, layer, rows.positions)
            keys, values = self._cache[layer]
            keys[:, rows.start : end], values[:, rows.start : end] = made.keys, made.values
            mixed = attend(made._replace(keys=keys[:, :end], values=values[:, :end]), rows.sees)
            stream = layers.leave(stream, mixed, layer)
        return formulas.goes_on_from(stream), formulas.logits(stream[rows.scored])


class EagleNetwork:
    """It keeps no text. tables: the target's. backend: what computes its steps; by default numpy
    does, in float32."""

    kind = EagleHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter
    shares_output = True  # what one pass scores is scored at once

    def __init__(
        self, head: EagleHead, tables: TargetTables, backend: HeadBackend | None = None
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self.window = head.window
        self.masks = head.masks
        self.num_heads = 1 if head.masks is None else head.masks.count
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

    def targets(self, scored: np.ndarray) -> np.ndarray:
        """Returns the target's ids of scored tokens."""
        return scored if self._head.token_ids is None else self._head.token_ids[scored]

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """scores: [..., num_scored] -> [..., vocab of the target] float32; tokens that it does not
        score have -inf."""
        return spread(scores, self._head.token_ids, self.config.vocab_size)


def eagle_matrices(head: EagleHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """Returns what a head multiplies with; matrices that read the same are one."""
    matrices = {"fc": own_matrix(head.tensors, ["fc"])}
    for layer in range(head.config.num_layers):
        matrices |= layer_matrices(head.tensors, f"layers.{layer}.", head.experts)
    return matrices | {"head": scored_matrix(head, tables)}
