"""A mixture of experts for onnxruntime.

Its operators compute an expert's rows together, so their last bits depend on each other. Passes up
to MAX_SINGLE_ROWS therefore compute each row alone, in a `Scan`, at the same cost: few of their
rows share an expert.

Where the operator lacks the activation, nodes sort the rows by expert and skip experts without
rows. In small passes each expert gets its rows twice: a matrix of one row runs in another kernel,
with other last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import LEAST_SUM, SWISH_SLOPE, Experts
from edge_spec.exporters.onnx.emitter import Emitter
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes, tensor
from edge_spec.exporters.requests import BLOCK_SIZE

MAX_SINGLE_ROWS = 16  # longest pass that computes each row alone
_NEVER, _LEAST = -1e30, 1e-37  # an unchosen score; a weight with a logarithm


def is_composed(config: ModelConfig) -> bool:
    """Return whether the experts are separate nodes instead of one operator."""
    experts = config.experts
    if experts is None or experts.clamp is not None:
        return False
    return config.activation != "silu" or experts.expert_scales


class _ExpertLayer:
    def __init__(self, graph: Emitter, prefix: str) -> None:
        assert graph.config.experts is not None
        self._graph, self._config, self._prefix = graph, graph.config, prefix
        self._experts: Experts = graph.config.experts

    def _rows(self, x: str, name: str) -> str:
        """[1, rows, hidden] -> [rows, hidden]."""
        shape = [-1, self._config.hidden_size]
        return self._graph.reshape(x, "rows_shape", shape, self._prefix + name)


class ComposedMixture(_ExpertLayer):
    """Add a layer's experts as separate nodes."""

    def add(self, x: str, routed: str) -> str:
        """Add the experts: x [1, rows, hidden] -> the same. routed: the router's input."""
        graph, prefix, used = self._graph, self._prefix, self._config.experts_used
        rows, routed = self._rows(x, "rows"), self._rows(routed, "routed")
        weights, taken = self._route(routed)
        taken = graph.reshape(taken, "experts.all", [-1], prefix + "takings")
        count = graph.add("Shape", [taken], prefix + "count")
        given = graph.add("Tile", [taken, self._times_given(rows)], prefix + "given")
        size = graph.add("Shape", [given], prefix + "given.count")
        order = self._sorted(given, size, prefix + "order")
        once = graph.add("Mod", [order, count], prefix + "order.once")
        each = graph.constant("experts.experts_used", used)
        sources = graph.add("Div", [once, each], prefix + "sources")
        apart = self._apart(graph.add("Gather", [rows, sources], prefix + "read"), given)
        added = [self._expert(*own, f"{prefix}experts.{n}.") for n, own in enumerate(apart)]
        joined = graph.add("Concat", added, prefix + "added", axis=0)
        places = self._sorted(order, size, prefix + "places")
        zero = graph.constant("experts.zero", [0])
        places = graph.add("Slice", [places, zero, count], prefix + "firsts")
        found = graph.add("Gather", [joined, places], prefix + "found")
        shape = [-1, used, self._config.hidden_size]
        found = graph.reshape(found, "experts.each", shape, prefix + "of_each")
        last = graph.constant("experts.last_place", [-1])
        column = graph.add("Unsqueeze", [weights, last], prefix + "weights.column")
        weighed = graph.add("Mul", [found, column], prefix + "weighed")
        middle = graph.constant("experts.middle", [1])
        mixed = graph.add("ReduceSum", [weighed, middle], prefix + "mixed", keepdims=0)
        whole = [1, -1, self._config.hidden_size]
        return graph.reshape(mixed, "experts.pass_shape", whole, prefix + "mixture")

    def _route(self, rows: str) -> tuple[str, str]:
        """Return weights and numbers of each row's experts, both [rows, experts used]."""
        graph, experts, prefix = self._graph, self._experts, self._prefix
        router = graph.vector(prefix + "router.weight")
        scores = graph.add("Gemm", [rows, router], prefix + "products", transB=1)
        scores = graph.times(scores, experts.score_scale, prefix + "scores")
        best, taken = prefix + "best", prefix + "taken"
        count = graph.constant("experts.num_used", [self._config.experts_used])
        graph.add("TopK", [scores, count], [best, taken], axis=-1)
        if experts.normalized:  # softmax over the chosen experts
            weights = graph.add("Softmax", [best], prefix + "shares", axis=-1)
        else:
            all_shares = graph.add("Softmax", [scores], prefix + "all_shares", axis=-1)
            weights = graph.add("GatherElements", [all_shares, taken], prefix + "shares", axis=-1)
        weights = graph.times(weights, experts.scale, prefix + "scaled_shares")
        if experts.expert_scales:
            scales = graph.vector(prefix + "expert_scale")
            own = graph.add("Gather", [scales, taken], prefix + "own_scales")
            weights = graph.add("Mul", [weights, own], prefix + "own_shares")
        return weights, taken

    def _times_given(self, rows: str) -> str:
        """Return how often each expert gets its rows, [1]."""
        graph, prefix = self._graph, self._prefix
        count = graph.add("Shape", [rows], prefix + "num_rows", end=1)
        limit = graph.constant("experts.most_given_twice", [MAX_SINGLE_ROWS])
        is_short = graph.add("LessOrEqual", [count, limit], prefix + "is_short")
        more = graph.add("Cast", [is_short], prefix + "once_more", to=TensorProto.INT64)
        return graph.add("Add", [more, graph.constant("experts.one", [1])], prefix + "times_given")

    def _sorted(self, numbers: str, count: str, output: str) -> str:
        """Return the order that sorts `numbers`. count: how many, [1]."""
        outputs = [output + ".sizes", output]
        self._graph.add("TopK", [numbers, count], outputs, axis=0, largest=0)
        return output

    def _apart(self, rows: str, given: str) -> list[tuple[str, str]]:
        """Return each expert's rows and whether it has any. given: the experts of unsorted rows."""
        graph, count, prefix = self._graph, self._config.num_experts, self._prefix
        last = graph.constant("experts.last_place", [-1])
        column = graph.add("Unsqueeze", [given, last], prefix + "each")
        every = graph.constant("every_expert", range(count))
        own = graph.add("Equal", [column, every], prefix + "is_own")
        own = graph.add("Cast", [own], prefix + "own", to=TensorProto.INT64)
        first = graph.constant("experts.first_place", [0])
        sizes = graph.add("ReduceSum", [own, first], prefix + "sizes", keepdims=0)
        names = [f"{prefix}experts.{expert}.rows" for expert in range(count)]
        graph.add("Split", [rows, sizes], names, axis=0)
        found = graph.add("Cast", [sizes], prefix + "are_taken", to=TensorProto.BOOL)
        are_taken = [f"{prefix}experts.{expert}.is_taken" for expert in range(count)]
        graph.add("Split", [found], are_taken, axis=0, num_outputs=count)
        return list(zip(names, are_taken, strict=True))

    def _expert(self, rows: str, is_taken: str, prefix: str) -> str:
        """Return an expert's output, [own rows, hidden]. Skipping one without rows costs less than
        five nodes that compute nothing."""
        graph, matrices = self._graph, self._graph.matrices
        start, shape = len(graph.protos), [None, self._config.hidden_size]
        names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
        gate, up = prefix + "gate", prefix + "up"
        graph.add("Split", [matrices.rounded(rows, names)], [gate, up], axis=-1, num_outputs=2)
        product = graph.add("Mul", [graph.activation(gate, prefix), up], prefix + "product")
        made = matrices.rounded(product, [prefix + "down_proj.weight"])
        computed, left = graph.branch(), graph.branch()
        computed.protos, graph.protos[start:] = graph.protos[start:], []
        none = left.add("Identity", [rows], prefix + "left")
        branches = computed.subgraph(made, [made], shape), left.subgraph(none, [none], shape)
        return graph.choose(is_taken, prefix + "added", *branches)


class Mixture(_ExpertLayer):
    """Add a layer's router and experts."""

    def add(self, x: str) -> str:
        """Add the mixture: x [1, rows, hidden] -> the same."""
        graph, prefix, hidden = self._graph, self._prefix, self._config.hidden_size
        kinds = ("weight", "bias") if self._experts.biases else ("weight",)
        self._router = [graph.vector(f"{prefix}router.{kind}") for kind in kinds]
        self._gate_up = self._matrices("gate_proj", "up_proj")
        self._down = self._matrices("down_proj")
        rows = self._rows(x, "rows")
        count = graph.add("Size", [rows], prefix + "size")
        limit = graph.constant("most_single", MAX_SINGLE_ROWS * hidden, np.int64)
        is_short = graph.add("LessOrEqual", [count, limit], prefix + "is_short")
        branches = self._singly(rows), self._together(rows)
        mixed = graph.choose(is_short, prefix + "mixed", *branches)
        return graph.reshape(mixed, "pass_shape", [1, -1, hidden], prefix + "mixture")

    def _matrices(self, *parts: str) -> list[str]:
        """Store these matrices of all experts, rows alternating, and their biases. Return the
        names, "" for no biases."""
        graph, prefix = self._graph, self._prefix
        experts = [f"{prefix}experts.{expert}." for expert in range(self._config.num_experts)]
        matrices = [[f"{each}{part}.weight" for part in parts] for each in experts]
        stored = graph.matrices.stacked(f"{prefix}{parts[-1]}.weight", matrices)
        if not self._experts.biases:
            return [*stored, ""]
        read = graph.checkpoint.float32
        biases = np.array([[read(f"{each}{part}.bias") for part in parts] for each in experts])
        turns = biases.swapaxes(1, 2).reshape(len(experts), -1)
        return [*stored, graph.weights.add(f"{prefix}{parts[-1]}.bias", turns)]

    def _singly(self, rows: str) -> GraphProto:
        inner, output = self._graph.branch(), self._prefix + "singles"
        inner.add("Scan", [rows], output, body=self._body(), num_scan_inputs=1)
        return inner.subgraph(output, [output])

    def _together(self, rows: str) -> GraphProto:
        inner, output = self._graph.branch(), self._prefix + "together"
        self._route(inner, rows, "all.", output)
        return inner.subgraph(output, [output])

    def _body(self) -> GraphProto:
        """Return the graph for one row, [hidden] -> [hidden]."""
        inner, prefix = self._graph.branch(), self._prefix + "single."
        first = inner.constant("first_axis", [0])
        row = inner.add("Unsqueeze", [prefix + "row", first], prefix + "alone")
        mixed = self._route(inner, row, "single.", prefix + "mixed")
        inner.add("Squeeze", [mixed, first], prefix + "result")
        hidden, kind = [self._config.hidden_size], TensorProto.FLOAT
        taken, given = (tensor(prefix + name, kind, hidden) for name in ("row", "result"))
        return helper.make_graph(inner.protos, prefix + "body", [taken], [given])

    def _route(self, graph: Emitter, rows: str, kind: str, output: str) -> str:
        """Route and mix: rows [rows, hidden] -> `output`, the same."""
        prefix = self._prefix + kind
        scores = graph.add("Gemm", [rows, *self._router], prefix + "scores", transB=1)
        if self._experts.sigmoid:
            scores, scale = self._of_sigmoids(graph, scores, prefix)
            mixed = self._mix(graph, rows, scores, prefix, prefix + "unscaled")
            return graph.add("Mul", [mixed, scale], output)
        return self._mix(graph, rows, scores, prefix, output)

    def _of_sigmoids(self, graph: Emitter, scores: str, prefix: str) -> tuple[str, str]:
        """Return scores for the operator, and its output's factor, [rows, 1].

        The operator only has a softmax, so scores are logarithms of the chosen experts' weights,
        and too low for all others.
        """
        shares = choice = graph.add("Sigmoid", [scores], prefix + "shares")
        if self._experts.choice_bias:
            bias = graph.vector(self._prefix + "expert_bias")
            choice = graph.add("Add", [shares, bias], prefix + "choice")
        count = graph.constant("experts_used", [self._config.experts_used])
        taken = prefix + "taken"
        graph.add("TopK", [choice, count], [prefix + "best", taken], axis=-1)
        own = graph.add("GatherElements", [shares, taken], prefix + "own", axis=-1)
        least = graph.constant("least_weight", _LEAST, np.float32)
        raised = graph.add("Add", [own, least], prefix + "raised")
        logs = graph.add("Log", [raised], prefix + "logs")
        never = helper.make_tensor("never", TensorProto.FLOAT, [1], [_NEVER])
        shape = graph.add("Shape", [scores], prefix + "shape")
        others = graph.add("ConstantOfShape", [shape], prefix + "others", value=never)
        found = graph.add("ScatterElements", [others, taken, logs], prefix + "chosen", axis=-1)
        axis = graph.constant("experts_axis", [-1])
        scale = graph.add("ReduceSum", [own, axis], prefix + "sum", keepdims=1)
        if self._experts.normalized:
            floor = graph.constant("least_sum", LEAST_SUM, np.float32)
            total = graph.add("Add", [scale, floor], prefix + "total")
            scale = graph.add("Div", [scale, total], prefix + "part")
        return found, graph.times(scale, self._experts.scale, prefix + "scale")

    def _mix(self, graph: Emitter, rows: str, scores: str, prefix: str, output: str) -> str:
        """Mix experts by `scores`: `rows` -> `output`, the same shape."""
        bits, read, clamp = graph.matrices.bits, [rows, scores], self._experts.clamp
        is_normalized = self._experts.normalized or self._experts.sigmoid
        gate: dict[str, float] = {"activation_alpha": 1.0, "activation_beta": 0.0}
        if clamp is not None:
            gate = {"activation_alpha": SWISH_SLOPE, "activation_beta": 1.0, "swiglu_limit": clamp}
        if bits is None:
            gate["normalize_routing_weights"] = int(is_normalized)
        elif not is_normalized:
            read += ["", graph.add("Softmax", [scores], prefix + "shares", axis=-1)]
        matrices = self._gate_up, self._down
        used = self._config.experts_used
        return add_moe(graph, read, matrices, output, bits, k=used, **gate)


def add_moe(
    nodes: Nodes,
    read: list[str],
    matrices: tuple[list[str], list[str]],
    output: str,
    bits: int | None,
    **attributes: Any,
) -> str:
    """Add onnxruntime's operator for experts.

    read: rows, scores, and QMoE's inputs after the zero points; matrices: alternating gate and up,
    and down, each as values, scales, zero points and a bias or ""; bits: None for floats.
    """
    (*up, up_bias), (*down, down_bias) = matrices
    inputs = [*read[:2], *up[:2], up_bias, *down[:2], down_bias]
    if bits is not None:
        inputs += ["", "", "", up[2], down[2], *read[2:]]
        attributes |= {"expert_weight_bits": bits, "block_size": BLOCK_SIZE}
    return nodes.add(
        "MoE" if bits is None else "QMoE",
        inputs,
        output,
        domain=CONTRIB,
        activation_type="swiglu",
        swiglu_fusion=1,
        **attributes,
    )
