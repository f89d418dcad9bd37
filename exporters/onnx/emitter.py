"""Adds what layers consist of to a graph, in onnxruntime's operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.nodes import CONTRIB, Initializers, Nodes
from edge_spec.exporters.onnx.weights import EMBEDDING, OnnxWeights


class Emitter(Nodes):
    """The nodes of a graph, or of a branch of one, that reads a checkpoint's tensors.

    x and what methods return are names of tensors, the last argument mostly what is returned; a
    constant or a weight is stored once for a name. matrices: how matrices are stored, given once
    there is a graph that they are added to.
    """

    matrices: OnnxWeights

    def __init__(self, weights: Initializers, checkpoint: StoredCheckpoint) -> None:
        super().__init__(weights)
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.head_name = EMBEDDING if self.config.tied_embeddings else "lm_head.weight"

    def branch(self) -> Emitter:
        """Returns an empty list of nodes that read the same weights."""
        inner = Emitter(self.weights, self.checkpoint)
        inner.matrices = self.matrices
        return inner

    def vector(self, name: str) -> str:
        return self.weights.add_made(name, lambda: self.checkpoint.float32(name))

    def linear(self, x: str, prefix: str, parts: Sequence[str], has_bias: bool = False) -> str:
        """x times transposed matrices side by side: [..., in] -> [..., sum of outs]."""
        biases = [f"{prefix}{part}.bias" for part in parts] if has_bias else []
        return self.matrices.linear(x, [f"{prefix}{part}.weight" for part in parts], biases)

    def norm(self, x: str, name: str, output: str = "") -> str:
        """Normalization by the vectors of that name."""
        is_layer_norm = self.config.layer_norm
        return self.add(
            "LayerNormalization" if is_layer_norm else "SimplifiedLayerNormalization",
            [x, *self._norm_vectors(name)],
            output or name + ".output",
            axis=-1,
            epsilon=self.config.norm_epsilon,
        )

    def skip_norm(self, summands: list[str], name: str, outputs: list[str] | str) -> None:
        """The norm of what two tensors add up to."""
        is_layer_norm = self.config.layer_norm
        self.add(
            "SkipLayerNormalization" if is_layer_norm else "SkipSimplifiedLayerNormalization",
            [*summands, *self._norm_vectors(name)],
            outputs,
            domain=CONTRIB,
            epsilon=self.config.norm_epsilon,
        )

    def _norm_vectors(self, name: str) -> list[str]:
        ends = ("weight", "bias") if self.config.layer_norm else ("weight",)
        return [self.vector(f"{name}.{end}") for end in ends]

    def times(self, x: str, scale: float, output: str) -> str:
        """x itself for a scale of 1."""
        return x if scale == 1.0 else self.add("Mul", [x, self._scalar(scale)], output)

    def softcap(self, x: str, cap: float, output: str) -> str:
        """Keeps x between -cap and cap: cap * tanh(x / cap)."""
        small = self.add("Div", [x, self._scalar(cap)], output + ".small")
        bounded = self.add("Tanh", [small], output + ".tanh")
        return self.add("Mul", [bounded, self._scalar(cap)], output)

    def _scalar(self, value: float) -> str:
        return self.constant(f"scalar_{value!r}", value, np.float32)

    def activation(self, gate: str, prefix: str) -> str:
        """The model's, one of edge_spec.core.config.ACTIVATIONS."""
        name = self.config.activation
        if name == "relu":
            return self.add("Relu", [gate], prefix + "relu")
        if name == "gelu":
            return self.add("Gelu", [gate], prefix + "gelu")
        if name == "gelu_tanh":
            return self.add("FastGelu", [gate], prefix + "gelu", domain=CONTRIB)
        return self.add("QuickGelu", [gate], prefix + "swish", domain=CONTRIB, alpha=1.0)


def window_bias(graph: Emitter, window: int) -> str:
    """`attention_bias` that lets a row see `window` positions at most, its own included."""
    prefix = f"window.{window}."
    distance = distances(graph, prefix)
    limit = graph.constant(f"window_{window}", window, np.int32)
    near = graph.add("Less", [distance, limit], prefix + "near")
    never = graph.constant("never", -np.inf, np.float32)
    return graph.add("Where", [near, "attention_bias", never], prefix + "bias")


def distances(graph: Emitter, prefix: str) -> str:
    """[attended, total] int32: how far each row stands after what it may attend to.

    Cached tokens stand at their positions, the rows of the pass after them at `position_ids`.
    """
    wide = graph.add("Squeeze", ["position_ids"], prefix + "wide")
    rows = graph.add("Cast", [wide], prefix + "rows", to=TensorProto.INT32)
    count = graph.add("Size", [rows], prefix + "count64")
    count = graph.add("Cast", [count], prefix + "count", to=TensorProto.INT32)
    past = graph.add("Sub", ["total_sequence_length", count], prefix + "past")
    cached = count_up(graph, past, prefix + "cached")
    positions = graph.add("Concat", [cached, rows], prefix + "positions", axis=0)
    last = graph.constant("last_axis", -1, np.int64)
    column = graph.add("Unsqueeze", [rows, last], prefix + "column")
    return graph.add("Sub", [column, positions], prefix + "distance")


def count_up(graph: Emitter, count: str, output: str) -> str:
    """[count] int32 from 0."""
    start = graph.constant("range_start", 0, np.int32)
    step = graph.constant("range_step", 1, np.int32)
    return graph.add("Range", [start, count, step], output)
