"""What graphs of layers of heads have in common: the formulas of Llama and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, ValueInfoProto

from edge_spec.core.heads import DFlashHead, EagleHead, HeadMatrix
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.heads.mixture import add_mixture
from edge_spec.exporters.onnx.graph import tensor
from edge_spec.exporters.onnx.nodes import CONTRIB


class LayersGraph:
    """Writes what graphs of layers of heads have in common: the formulas of Llama and Qwen3.

    matrices: all of the head's; bits: of layers, as `HeadGraph.multiply` has them, and of output
    matrices as `HeadGraph.score` does.
    """

    def __init__(
        self,
        head: EagleHead | DFlashHead,
        matrices: Mapping[str, HeadMatrix],
        bits: int,
        weights: BinaryIO,
    ) -> None:
        self._config, self._tensors = head.config, head.tensors
        self._experts = head.experts if isinstance(head, EagleHead) else None
        self._matrices, self._bits = matrices, bits
        self._graph = HeadGraph(weights)
        self._norms = {name: head.tensors[name] for name in head.tensors if "norm" in name}

    def _turned(self, x: str, heads: int, positions: str) -> str:
        """x: [1, rows, heads * head_dim] of queries or keys, normed where there is such a norm."""
        config = self._config
        partial = {"rotary_embedding_dim": config.rotary_dim} if config.rotary_dim else {}
        return self._graph.add(
            "RotaryEmbedding",
            [self._norm_each(x), positions, "cos", "sin"],
            x + ".turned",
            domain=CONTRIB,
            num_heads=heads,
            **partial,
        )

    def _leave(self, stream: str, mixed: str, layer: int) -> str:
        graph, prefix = self._graph, f"layers.{layer}."
        attended = self._multiply(mixed, prefix + "o")
        stream = graph.add("Add", [stream, attended], prefix + "attended")
        read = self._norm(stream, prefix + "post_norm")
        joined = self._multiply(read, prefix + "gate_up")
        halves = [prefix + "gate", prefix + "up"]
        graph.add("Split", [joined], halves, axis=-1, num_outputs=2)
        gated = graph.silu(halves[0], prefix + "activated")
        product = graph.add("Mul", [gated, halves[1]], prefix + "product")
        update = self._multiply(product, prefix + "down")
        if self._experts is not None:
            shared = graph.add(
                "Sigmoid", [self._multiply(read, prefix + "shared_gate")], prefix + "shared"
            )
            own = graph.add("Mul", [update, shared], prefix + "own")
            mixed = add_mixture(graph, self._matrices, self._experts, self._bits, read, prefix)
            update = graph.add("Add", [own, mixed], prefix + "both")
        return graph.add("Add", [stream, update], prefix + "stream")

    def _multiply(self, x: str, name: str, output: str = "") -> str:
        matrix = self._matrices[name]
        multiply = self._graph.score if matrix.is_output else self._graph.multiply
        return multiply(x, name, matrix, self._bits, output or name + ".output")

    def _norm(self, x: str, name: str) -> str:
        """Root mean square normalization, where the head has such a norm."""
        weight = self._norms.get(name)
        if weight is None:
            return x
        return self._graph.add(
            "SimplifiedLayerNormalization",
            [x, self._graph.weight(name, weight.astype(np.float32))],
            f"{name}.output",
            axis=-1,
            epsilon=self._config.norm_epsilon,
        )

    def _norm_each(self, x: str) -> str:
        """The norm of each head of queries or keys, where there is one."""
        if f"{x}_norm" not in self._norms:
            return x
        graph, size = self._graph, self._config.head_dim
        shape = graph.weight("head_shape", np.array([1, 0, -1, size]))
        split = graph.add("Reshape", [x, shape], x + ".heads")
        flat = graph.weight("flat_shape", np.array([1, 0, -1]))
        return graph.add("Reshape", [self._norm(split, f"{x}_norm"), flat], x + ".flat")

    def _tables(self) -> list[ValueInfoProto]:
        """The inputs of rotary tables."""
        half = self._config.rotated // 2
        return [tensor(name, TensorProto.FLOAT, ["positions", half]) for name in ("cos", "sin")]

    def _keys_values(self, when: str, slots: str) -> list[ValueInfoProto]:
        """Returns keys and values of all layers; when: what their names begin with."""
        shape: list[int | str] = [1, self._config.num_kv_heads, slots, self._config.head_dim]
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self._config.num_layers)
            for part in ("key", "value")
        ]
