"""A mixture of experts of nodes, where onnxruntime's own operator does not know its activation.

The rows of a pass are sorted by the experts that they take, and each expert computes its own, none
where no row takes it. In a pass of as many rows as decoding verifies, each row is given to its
experts twice: a matrix of one row takes another kernel than one of several, whose last bits differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from edge_spec.core.model_parts import Experts
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.attention import vector
from edge_spec.exporters.onnx.elementwise import activation, times
from edge_spec.exporters.onnx.experts import MAX_SINGLE_ROWS
from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights


class ComposedMixture:
    """Adds the experts of one layer after another."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        assert checkpoint.config.experts is not None
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config
        self._experts: Experts = checkpoint.config.experts

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
