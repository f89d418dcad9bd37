"""The MLP of a layer, or what it has in its place or beside it: a mixture of experts."""

from __future__ import annotations

from edge_spec.exporters.alternatives import is_composed
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.attention import norm
from edge_spec.exporters.onnx.composed_experts import ComposedMixture
from edge_spec.exporters.onnx.elementwise import activation
from edge_spec.exporters.onnx.experts import Mixture
from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights


class Mlp:
    """Adds that of one layer after another. x: [1, rows, hidden] -> the same; prefix: of the names
    of the layer's tensors."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config

    def add(self, x: str, prefix: str) -> str:
        """Returns what the last matrix of an MLP makes."""
        nodes = self._nodes
        if not self._config.gated_mlp:
            up = self._linear(x, prefix + "up_proj")
            activated = activation(nodes, up, self._config.activation, prefix)
            return self._linear(activated, prefix + "down_proj")
        joined = self._weights.linear(
            x, [prefix + "gate_proj.weight", prefix + "up_proj.weight"], []
        )
        gate, up = prefix + "gate", prefix + "up"
        nodes.add("Split", [joined], [gate, up], axis=-1, num_outputs=2)
        activated = activation(nodes, gate, self._config.activation, prefix)
        product = nodes.add("Mul", [activated, up], prefix + "product")
        return self._weights.linear(product, [prefix + "down_proj.weight"], [])

    def add_experts(self, x: str, stream: str, prefix: str) -> str:
        """Returns what a layer's experts, and its MLP if any, make. stream: what x is
        a norm of."""
        experts = self._config.experts
        if experts is None or not experts.beside_mlp:
            return self._mixture(x, x, prefix)
        dense = self._norm(self.add(x, prefix), prefix + "dense_post_norm")
        routed = self._norm(stream, prefix + "router_norm")
        read = self._norm(stream, prefix + "experts_norm")
        mixed = self._norm(self._mixture(read, routed, prefix), prefix + "experts_post_norm")
        return self._nodes.add("Add", [dense, mixed], prefix + "both")

    def _mixture(self, x: str, routed: str, prefix: str) -> str:
        """routed: what the router reads."""
        if is_composed(self._config):
            composed = ComposedMixture(self._nodes, self._weights, self._checkpoint)
            return composed.add(x, routed, prefix)
        return Mixture(self._nodes, self._weights, self._checkpoint).add(x, prefix)

    def _linear(self, x: str, name: str) -> str:
        biases = [name + ".bias"] if self._config.mlp_bias else []
        return self._weights.linear(x, [name + ".weight"], biases)

    def _norm(self, x: str, name: str) -> str:
        return norm(self._nodes, self._checkpoint, x, name)
