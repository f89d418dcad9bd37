"""A mixture of experts, in the operators that onnxruntime has for it.

These read the rows that share an expert together, whose last bits then depend on each other. A pass
of as many rows as decoding verifies computes each row by itself, in a `Scan`: with random routing
few rows of a small pass share an expert, so that it costs what the operator alone does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.model_parts import LEAST_SUM, SWISH_SLOPE, Experts
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.elementwise import times
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights

MAX_SINGLE_ROWS = 16  # up to which each row is computed by itself
_NEVER, _LEAST = -1e30, 1e-37  # a score that is not chosen, and a weight that has a logarithm


class Mixture:
    """Adds router and experts of one layer after another."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        assert checkpoint.config.experts is not None
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config
        self._experts: Experts = checkpoint.config.experts

    def add(self, x: str, prefix: str) -> str:
        """x: [1, rows, hidden] -> the same; prefix: of the names of the layer's tensors."""
        nodes, hidden = self._nodes, self._config.hidden_size
        layer = _Layer(
            prefix,
            self._router(prefix),
            self._matrices(prefix, "gate_proj", "up_proj"),
            self._matrices(prefix, "down_proj"),
        )
        sizes = nodes.weights.add("rows_shape", np.array([-1, hidden]))
        rows = nodes.add("Reshape", [x, sizes], prefix + "rows")
        count = nodes.add("Size", [rows], prefix + "size")
        limit = nodes.weights.add("most_single", np.array(MAX_SINGLE_ROWS * hidden, np.int64))
        is_short = nodes.add("LessOrEqual", [count, limit], prefix + "is_short")
        mixed = nodes.add(
            "If",
            [is_short],
            prefix + "mixed",
            then_branch=self._singly(rows, layer),
            else_branch=self._together(rows, layer),
        )
        whole = nodes.weights.add("pass_shape", np.array([1, -1, hidden]))
        return nodes.add("Reshape", [mixed, whole], prefix + "mixture")

    def _router(self, prefix: str) -> list[str]:
        kinds = ("weight", "bias") if self._experts.biases else ("weight",)
        names = [f"{prefix}router.{kind}" for kind in kinds]
        return [self._nodes.weights.add(name, self._checkpoint.float32(name)) for name in names]

    def _matrices(self, prefix: str, *parts: str) -> list[str]:
        """Stores these matrices of all experts, their rows in turns, and their biases. Returns the
        names; the last is "" where there are no biases."""
        experts = [f"{prefix}experts.{expert}." for expert in range(self._config.num_experts)]
        matrices = [[f"{each}{part}.weight" for part in parts] for each in experts]
        stored = self._weights.stacked(f"{prefix}{parts[-1]}.weight", matrices)
        if not self._experts.biases:
            return [*stored, ""]
        read = self._checkpoint.float32
        biases = np.array([[read(f"{each}{part}.bias") for part in parts] for each in experts])
        turns = biases.swapaxes(1, 2).reshape(len(experts), -1)
        return [*stored, self._nodes.weights.add(f"{prefix}{parts[-1]}.bias", turns)]

    def _singly(self, rows: str, layer: _Layer) -> GraphProto:
        inner, output = Nodes(self._nodes.weights), layer.prefix + "singles"
        inner.add("Scan", [rows], output, body=self._body(layer), num_scan_inputs=1)
        return helper.make_graph(inner.protos, output, [], [_value(output, None)])

    def _together(self, rows: str, layer: _Layer) -> GraphProto:
        inner, output = Nodes(self._nodes.weights), layer.prefix + "together"
        self._route(inner, rows, layer, "all.", output)
        return helper.make_graph(inner.protos, output, [], [_value(output, None)])

    def _body(self, layer: _Layer) -> GraphProto:
        """One row, [hidden] -> [hidden]."""
        inner, prefix = Nodes(self._nodes.weights), layer.prefix + "single."
        first = inner.weights.add("first_axis", np.array([0]))
        row = inner.add("Unsqueeze", [prefix + "row", first], prefix + "alone")
        mixed = self._route(inner, row, layer, "single.", prefix + "mixed")
        inner.add("Squeeze", [mixed, first], prefix + "result")
        hidden = [self._config.hidden_size]
        taken, given = _value(prefix + "row", hidden), _value(prefix + "result", hidden)
        return helper.make_graph(inner.protos, prefix + "body", [taken], [given])

    def _route(self, nodes: Nodes, rows: str, layer: _Layer, kind: str, output: str) -> str:
        """rows: [rows, hidden] -> `output`, the same."""
        prefix = layer.prefix + kind
        scores = nodes.add("Gemm", [rows, *layer.router], prefix + "scores", transB=1)
        if self._experts.sigmoid:
            scores, scale = self._of_sigmoids(nodes, scores, layer, prefix)
            mixed = self._mix(nodes, rows, scores, layer, prefix, prefix + "unscaled")
            return nodes.add("Mul", [mixed, scale], output)
        return self._mix(nodes, rows, scores, layer, prefix, output)

    def _of_sigmoids(
        self, nodes: Nodes, scores: str, layer: _Layer, prefix: str
    ) -> tuple[str, str]:
        """Scores whose softmax over the likeliest are the normalized weights, and what is to be
        multiplied with what experts add, [rows, 1]. The operators know softmaxes alone: the scores
        are logarithms of the weights of those that are chosen, and no others are."""
        weights = nodes.weights
        shares = choice = nodes.add("Sigmoid", [scores], prefix + "shares")
        if self._experts.choice_bias:
            name = layer.prefix + "expert_bias"
            bias = weights.add(name, self._checkpoint.float32(name))
            choice = nodes.add("Add", [shares, bias], prefix + "choice")
        count = weights.add("experts_used", np.array([self._config.experts_used]))
        taken = prefix + "taken"
        nodes.add("TopK", [choice, count], [prefix + "best", taken], axis=-1)
        own = nodes.add("GatherElements", [shares, taken], prefix + "own", axis=-1)
        least = weights.add("least_weight", np.array(_LEAST, np.float32))
        raised = nodes.add("Add", [own, least], prefix + "raised")
        logs = nodes.add("Log", [raised], prefix + "logs")
        never = helper.make_tensor("never", TensorProto.FLOAT, [1], [_NEVER])
        shape = nodes.add("Shape", [scores], prefix + "shape")
        others = nodes.add("ConstantOfShape", [shape], prefix + "others", value=never)
        found = nodes.add("ScatterElements", [others, taken, logs], prefix + "chosen", axis=-1)
        axis = weights.add("experts_axis", np.array([-1]))
        scale = nodes.add("ReduceSum", [own, axis], prefix + "sum", keepdims=1)
        if self._experts.normalized:
            floor = weights.add("least_sum", np.array(LEAST_SUM, np.float32))
            total = nodes.add("Add", [scale, floor], prefix + "total")
            scale = nodes.add("Div", [scale, total], prefix + "part")
        return found, times(nodes, scale, self._experts.scale, prefix + "scale")

    def _mix(
        self, nodes: Nodes, rows: str, scores: str, layer: _Layer, prefix: str, output: str
    ) -> str:
        """rows, and the scores that tell how their experts are mixed -> `output`, as `rows`."""
        blocks = self._weights.blocks
        is_normalized = self._experts.normalized or self._experts.sigmoid
        (*up, up_bias), (*down, down_bias) = layer.gate_up, layer.down
        inputs = [rows, scores, *up[:2], up_bias, *down[:2], down_bias]
        attributes = self._gate()
        if blocks is None:
            attributes["normalize_routing_weights"] = int(is_normalized)
        else:
            inputs += ["", "", "", up[2], down[2]]
            if not is_normalized:
                inputs += ["", nodes.add("Softmax", [scores], prefix + "shares", axis=-1)]
            attributes |= {"expert_weight_bits": blocks[0], "block_size": blocks[1]}
        return nodes.add(
            "MoE" if blocks is None else "QMoE",
            inputs,
            output,
            domain=CONTRIB,
            k=self._config.experts_used,
            activation_type="swiglu",
            swiglu_fusion=1,
            **attributes,
        )

    def _gate(self) -> dict[str, float]:
        clamp = self._experts.clamp
        if clamp is None:
            return {"activation_alpha": 1.0, "activation_beta": 0.0}
        return {"activation_alpha": SWISH_SLOPE, "activation_beta": 1.0, "swiglu_limit": clamp}


@dataclass(frozen=True)
class _Layer:
    """Holds what a layer's experts are stored as; the biases of matrices come last."""

    prefix: str
    router: list[str]
    gate_up: list[str]
    down: list[str]


def _value(name: str, shape: list[int] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
