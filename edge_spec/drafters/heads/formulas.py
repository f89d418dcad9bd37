"""The arithmetic of an EAGLE head: the formulas as they are published, one line each."""

from __future__ import annotations

import numpy as np

from edge_spec.core.heads import EagleHead, EagleStep, EntryRows
from edge_spec.drafters.heads.float_products import FloatProducts
from edge_spec.drafters.heads.layers import HeadLayers, attend


class EagleFormulas:
    """Drafts where there is no backend; the steps of backends are compared with it."""

    def __init__(self, head: EagleHead, products: FloatProducts) -> None:
        self.num_layers = head.config.num_layers
        self._head = head
        self._layers = HeadLayers(head.config, products, head.tensors)
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
