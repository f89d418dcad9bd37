"""Writes the embeddings and the scale of each layer that Gemma 4 has.

An embedding of a layer is a part of a row of one table of all layers, and of what one matrix makes
of the token's own embedding. It is added, behind a gate, to what the MLP leaves. That is no
sublayer that a draft may leave out (partial.py): it is part of what each layer does. What is
estimated there of how far a sublayer turns the stream does not know of it.
"""

from __future__ import annotations

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.attention import norm, vector
from edge_spec.exporters.onnx.elementwise import activation, times
from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights

_PREFIX = "layer_inputs."


class LayerInputs:
    """Adds nothing where a model's layers have neither."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config: ModelConfig = checkpoint.config
        self._inputs: list[str] = []  # of each layer, [1, rows, size]

    def begin(self, embedded: str) -> None:
        """embedded: [1, rows, hidden], the stream before the first layer."""
        own, nodes = self._config.layer_embeddings, self._nodes
        if own is None:
            return
        stored = _PREFIX + "stored"
        self._weights.embed("input_ids", stored, "model.embed_tokens_per_layer.weight")
        stored = times(nodes, stored, own.scale, _PREFIX + "scaled")
        projected = self._weights.linear(embedded, ["model.per_layer_model_projection.weight"], [])
        projected = times(nodes, projected, own.projected_scale, _PREFIX + "projected")
        each = nodes.weights.add("layer_input_shape", np.array([1, 0, -1, own.size]))
        flat = nodes.weights.add("flat_shape", np.array([1, 0, -1]))
        apart = nodes.add("Reshape", [projected, each], _PREFIX + "apart")
        normed = norm(nodes, self._checkpoint, apart, "model.per_layer_projection_norm")
        normed = nodes.add("Reshape", [normed, flat], _PREFIX + "normed")
        both = nodes.add("Add", [normed, stored], _PREFIX + "sum")
        both = times(nodes, both, own.sum_scale, _PREFIX + "all")
        count = self._config.num_layers
        self._inputs = [f"{_PREFIX}{layer}" for layer in range(count)]
        nodes.add("Split", [both], self._inputs, axis=-1, num_outputs=count)

    def end_layer(self, layer: int, update: str, residual: str) -> tuple[str, str]:
        """update: what the layer's MLP adds to `residual`, both [1, rows, hidden]. Returns two that
        add up to the stream that the layer leaves."""
        nodes, prefix = self._nodes, f"model.layers.{layer}."
        if self._inputs:
            residual = nodes.add("Add", [update, residual], prefix + "stream")
            update = self._of_token(residual, prefix, self._inputs[layer])
        if not self._config.layer_scale:
            return update, residual
        scale = vector(nodes, self._checkpoint, prefix + "layer_scalar")
        return (
            nodes.add("Mul", [update, scale], prefix + "update.scaled"),
            nodes.add("Mul", [residual, scale], prefix + "stream.scaled"),
        )

    def _of_token(self, x: str, prefix: str, own: str) -> str:
        nodes = self._nodes
        gate = self._weights.linear(x, [prefix + "per_layer_input_gate.weight"], [])
        activated = activation(nodes, gate, self._config.activation, prefix + "per_layer_input.")
        product = nodes.add("Mul", [activated, own], prefix + "per_layer_input.product")
        update = self._weights.linear(product, [prefix + "per_layer_projection.weight"], [])
        return norm(nodes, self._checkpoint, update, prefix + "post_per_layer_input_norm")
