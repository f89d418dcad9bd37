"""A mixture of experts, in the operators that onnxruntime has for it.

These read the rows that share an expert together, whose last bits then depend on each other. A pass
of as many rows as decoding verifies computes each row by itself, in a `Scan`: with random routing
few rows of a small pass share an expert, so that it costs what the operator alone does.

Where that operator does not know the activation, the mixture is made of nodes. The rows of a pass
are sorted by the experts that they take, and each expert computes its own, none where no row takes
it. In a pass of as many rows as decoding verifies, each row is given to its experts twice: a matrix
of one row takes another kernel than one of several, whose last bits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.model_parts import LEAST_SUM, SWISH_SLOPE, Experts
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.attention import vector
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes, activation, times
from edge_spec.exporters.onnx.weights import OnnxWeights


class _OfExperts:
    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        assert checkpoint.config.experts is not None
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config
        self._experts: Experts = checkpoint.config.experts


class ComposedMixture(_OfExperts):
    """Adds the experts of one layer after another."""

    def add(self, x: str, routed: str, prefix: str) -> str:
        """x: [1, rows, hidden], what experts read -> the same; routed: what the router reads;
        prefix: of the names of the layer's tensors."""
        nodes = self._nodes
        flat = nodes.weights.add("rows_shape", np.array([-1, self._config.hidden_size]))
        rows = nodes.add("Reshape", [x, flat], prefix + "rows")
        routed = nodes.add("Reshape", [routed, flat], prefix + "routed")
        weights, taken = self._route(routed, prefix)
        taken = nodes.add("Reshape", [taken, self._number("all", [-1])], prefix + "takings")
        count = nodes.add("Shape", [taken], prefix + "count")
        given = nodes.add("Tile", [taken, self._times_given(rows, prefix)], prefix + "given")
        size = nodes.add("Shape", [given], prefix + "given.count")
        order = self._sorted(given, size, prefix + "order")
        once = nodes.add("Mod", [order, count], prefix + "order.once")
        used = self._number("experts_used", self._config.experts_used)
        sources = nodes.add("Div", [once, used], prefix + "sources")
        apart = self._apart(nodes.add("Gather", [rows, sources], prefix + "read"), given, prefix)
        added = [self._expert(*own, f"{prefix}experts.{n}.") for n, own in enumerate(apart)]
        joined = nodes.add("Concat", added, prefix + "added", axis=0)
        places = self._sorted(order, size, prefix + "places")
        places = nodes.add("Slice", [places, self._number("zero", [0]), count], prefix + "firsts")
        found = nodes.add("Gather", [joined, places], prefix + "found")
        each = [-1, self._config.experts_used, self._config.hidden_size]
        found = nodes.add("Reshape", [found, self._number("each", each)], prefix + "of_each")
        last = self._number("last_place", [-1])
        column = nodes.add("Unsqueeze", [weights, last], prefix + "weights.column")
        weighed = nodes.add("Mul", [found, column], prefix + "weighed")
        middle = self._number("middle", [1])
        mixed = nodes.add("ReduceSum", [weighed, middle], prefix + "mixed", keepdims=0)
        whole = self._number("pass_shape", [1, -1, self._config.hidden_size])
        return nodes.add("Reshape", [mixed, whole], prefix + "mixture")

    def _route(self, rows: str, prefix: str) -> tuple[str, str]:
        """Weights and numbers of the experts that each row takes, both [rows, experts used]."""
        nodes, experts = self._nodes, self._experts
        router = vector(nodes, self._checkpoint, prefix + "router.weight")
        scores = nodes.add("Gemm", [rows, router], prefix + "products", transB=1)
        scores = times(nodes, scores, experts.score_scale, prefix + "scores")
        best, taken = prefix + "best", prefix + "taken"
        count = self._number("num_used", [self._config.experts_used])
        nodes.add("TopK", [scores, count], [best, taken], axis=-1)
        if experts.normalized:  # a softmax over those that are taken
            weights = nodes.add("Softmax", [best], prefix + "shares", axis=-1)
        else:
            all_shares = nodes.add("Softmax", [scores], prefix + "all_shares", axis=-1)
            weights = nodes.add("GatherElements", [all_shares, taken], prefix + "shares", axis=-1)
        weights = times(nodes, weights, experts.scale, prefix + "scaled_shares")
        if experts.expert_scales:
            scales = vector(nodes, self._checkpoint, prefix + "expert_scale")
            own = nodes.add("Gather", [scales, taken], prefix + "own_scales")
            weights = nodes.add("Mul", [weights, own], prefix + "own_shares")
        return weights, taken

    def _times_given(self, rows: str, prefix: str) -> str:
        """Returns how often each row is given to its experts, [1]."""
        nodes = self._nodes
        count = nodes.add("Shape", [rows], prefix + "num_rows", end=1)
        limit = self._number("most_given_twice", [MAX_SINGLE_ROWS])
        is_short = nodes.add("LessOrEqual", [count, limit], prefix + "is_short")
        kind = TensorProto.INT64
        more = nodes.add("Cast", [is_short], prefix + "once_more", to=kind)
        return nodes.add("Add", [more, self._number("one", [1])], prefix + "times_given")

    def _sorted(self, numbers: str, count: str, output: str) -> str:
        """The places of numbers in the order of their sizes; count: of them, [1]."""
        outputs = [output + ".sizes", output]
        self._nodes.add("TopK", [numbers, count], outputs, axis=0, largest=0)
        return output

    def _apart(self, rows: str, given: str, prefix: str) -> list[tuple[str, str]]:
        """The rows of each expert, and whether there are any; given: the experts that unsorted rows
        take."""
        nodes, count = self._nodes, self._config.num_experts
        column = nodes.add("Unsqueeze", [given, self._number("last_place", [-1])], prefix + "each")
        every = nodes.weights.add("every_expert", np.arange(count))
        own = nodes.add("Equal", [column, every], prefix + "is_own")
        own = nodes.add("Cast", [own], prefix + "own", to=TensorProto.INT64)
        first = self._number("first_place", [0])
        sizes = nodes.add("ReduceSum", [own, first], prefix + "sizes", keepdims=0)
        names = [f"{prefix}experts.{expert}.rows" for expert in range(count)]
        nodes.add("Split", [rows, sizes], names, axis=0)
        found = nodes.add("Cast", [sizes], prefix + "are_taken", to=TensorProto.BOOL)
        are_taken = [f"{prefix}experts.{expert}.is_taken" for expert in range(count)]
        nodes.add("Split", [found], are_taken, axis=0, num_outputs=count)
        return list(zip(names, are_taken, strict=True))

    def _expert(self, rows: str, is_taken: str, prefix: str) -> str:
        """Returns what an expert adds to its rows, [own rows, hidden]: none where no row takes it,
        which costs less than five nodes that compute nothing."""
        nodes, weights = self._nodes, self._weights
        start = len(nodes.protos)
        names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
        gate, up = prefix + "gate", prefix + "up"
        nodes.add("Split", [weights.rounded(rows, names)], [gate, up], axis=-1, num_outputs=2)
        activated = activation(nodes, gate, self._config.activation, prefix)
        product = nodes.add("Mul", [activated, up], prefix + "product")
        made = weights.rounded(product, [prefix + "down_proj.weight"])
        then_branch = self._branch(nodes.protos[start:], made)
        del nodes.protos[start:]
        left = nodes.add("Identity", [rows], prefix + "left")
        else_branch = self._branch([nodes.protos.pop()], left)
        return nodes.add(
            "If", [is_taken], prefix + "added", then_branch=then_branch, else_branch=else_branch
        )

    def _branch(self, protos: Sequence[NodeProto], output: str) -> GraphProto:
        shape = [None, self._config.hidden_size]
        value = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
        return helper.make_graph(protos, output, [], [value])

    def _number(self, name: str, value: int | list[int]) -> str:
        return self._nodes.weights.add(f"experts.{name}", np.array(value, np.int64))


MAX_SINGLE_ROWS = 16  # up to which each row is computed by itself
_NEVER, _LEAST = -1e30, 1e-37  # a score that is not chosen, and a weight that has a logarithm


class Mixture(_OfExperts):
    """Adds router and experts of one layer after another."""

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
