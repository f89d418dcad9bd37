"""Medusa heads as one graph, which scores the tokens of heads and picks the likeliest.

state      [1, hidden]               after the target's final norm
asked      [heads] bool              which heads are scored, where each has an output matrix
logits     [scored, scored tokens]   of all heads, where they share one
likeliest  [scored, LIKELIEST] int64 of the scored tokens, in falling order
shares     [scored, LIKELIEST]       of the sum of e to the logits

Heads that share an output matrix are scored in one go, which reads it once. Each head with one of
its own stands in a branch of an `If`: those that are not asked cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import BinaryIO

import numpy as np
from onnx import GraphProto, TensorProto, helper

from edge_spec.core.heads import HeadMatrix, MedusaHead
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.graph import tensor


class MedusaGraph:
    """matrices: K.B of block B of head K, and output.K, or output.0 that they share; bits: as
    `HeadGraph.multiply` has them."""

    def __init__(
        self, head: MedusaHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
    ) -> None:
        self._head, self._matrices, self._bits = head, matrices, bits
        self._graph = HeadGraph(weights)

    def built(self) -> bytes:
        """Returns a serialized ModelProto, whose weights are written."""
        head, graph = self._head, self._graph
        shares = len(head.outputs) == 1
        if shares:
            logits = self._score(graph, self._states(), 0, "logits")
        else:
            rows = [self._where_asked(index) for index in range(head.num_heads)]
            logits = graph.add("Concat", rows, "logits", axis=0)
        outputs = graph.tell_likeliest(logits, self._num_scored)
        inputs = [tensor("state", TensorProto.FLOAT, [1, head.hidden_size])]
        if not shares:
            inputs.append(tensor("asked", TensorProto.BOOL, [head.num_heads]))
        return graph.serialized("heads", inputs, outputs)

    @property
    def _num_scored(self) -> int:
        ids = self._head.token_ids
        return self._head.vocab_size if ids is None else len(ids)

    def _states(self) -> str:
        """[heads, hidden] after the blocks of all heads."""
        head, graph = self._head, self._graph
        count = range(head.num_heads)
        if all(len(blocks) == 1 for blocks in head.blocks):
            return self._after_one_block([self._matrices[f"{index}.0"] for index in count])
        states = [self._after_blocks(graph, index) for index in count]
        return graph.add("Concat", states, "states", axis=0)

    def _where_asked(self, index: int) -> str:
        """[1, tokens], or [0, tokens] where the head is not asked."""
        graph, name = self._graph, f"{index}.logits"

        def branch(nodes: HeadGraph, output: str) -> GraphProto:
            found = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
            return helper.make_graph(nodes.protos, output, [], [found])

        scored, none = graph.branch(), graph.branch()
        scored_rows = self._score(scored, self._after_blocks(scored, index), index, name + ".then")
        nothing = graph.weight("no_rows", np.zeros((0, self._num_scored), np.float32))
        no_rows = none.add("Identity", [nothing], name + ".else")
        place = graph.weight(f"{index}.place", np.array([index]))
        return graph.add(
            "If",
            [graph.add("Gather", ["asked", place], f"{index}.asked", axis=0)],
            name,
            then_branch=branch(scored, scored_rows),
            else_branch=branch(none, no_rows),
        )

    def _score(self, graph: HeadGraph, states: str, output: int, name: str) -> str:
        matrix = f"output.{output}"
        return graph.score(states, matrix, self._matrices[matrix], self._bits, name)

    def _after_one_block(self, blocks: Sequence[HeadMatrix]) -> str:
        """All heads read the same state: their matrices are one."""
        head, graph = self._head, self._graph
        biases = [each.bias for each in blocks if each.bias is not None]
        parts = tuple(part for each in blocks for part in each.parts)
        joined = HeadMatrix(parts, np.concatenate(biases))
        inner = graph.multiply("state", "blocks", joined, self._bits, "blocks.inner")
        shape = graph.weight("head_rows", np.array([head.num_heads, head.hidden_size]))
        update = graph.add("Reshape", [graph.silu(inner, "blocks.silu"), shape], "update")
        return graph.add("Add", ["state", update], "states")

    def _after_blocks(self, graph: HeadGraph, index: int) -> str:
        """z + SiLU(A z + b), block after block."""

        def after(state: str, block: int) -> str:
            name = f"{index}.{block}"
            inner = graph.multiply(state, name, self._matrices[name], self._bits, name + ".inner")
            return graph.add("Add", [state, graph.silu(inner, name + ".silu")], name + ".state")

        return reduce(after, range(len(self._head.blocks[index])), "state")
