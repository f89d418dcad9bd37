"""Medusa heads as one graph, which scores the tokens of all heads and picks the likeliest.

state      [1, hidden]              after the target's final norm
logits     [heads, scored tokens]
likeliest  [heads, LIKELIEST] int64 of the scored tokens, in falling order
shares     [heads, LIKELIEST]       of the sum of e to the logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from onnx import TensorProto

from edge_spec.core.heads import HeadMatrix, MedusaHead
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.graph import tensor

LIKELIEST = 4  # tokens of a head that are told: as many as a row of a tree has after it at most


def medusa_graph(head: MedusaHead, matrices: Mapping[str, HeadMatrix], bits: int) -> bytes:
    """Returns a serialized ModelProto. matrices: K.B of block B of head K, and output.0, which
    they share; bits: as `HeadGraph.multiply` has them."""
    graph = HeadGraph()
    count = head.num_heads
    if all(len(blocks) == 1 for blocks in head.blocks):
        rows = _after_one_block(graph, head, [matrices[f"{i}.0"] for i in range(count)], bits)
    else:
        states = [_after_blocks(graph, head, matrices, bits, index) for index in range(count)]
        rows = graph.add("Concat", states, "states", axis=0)
    logits = graph.multiply(rows, "output", matrices["output.0"], max(bits, 8), "logits")
    probs = graph.add("Softmax", [logits], "probs", axis=-1)
    tokens = len(head.token_ids) if head.token_ids is not None else head.vocab_size
    kept = graph.weight("kept", np.array([min(LIKELIEST, tokens)]))
    graph.add("TopK", [probs, kept], ["shares", "likeliest"], axis=-1)
    return graph.serialized(
        "heads",
        [tensor("state", TensorProto.FLOAT, [1, head.hidden_size])],
        [
            tensor("logits", TensorProto.FLOAT, ["heads", "tokens"]),
            tensor("likeliest", TensorProto.INT64, ["heads", "count"]),
            tensor("shares", TensorProto.FLOAT, ["heads", "count"]),
        ],
    )


def _after_one_block(
    graph: HeadGraph, head: MedusaHead, blocks: Sequence[HeadMatrix], bits: int
) -> str:
    """All heads read the same state: their matrices are one."""
    biases = [each.bias for each in blocks if each.bias is not None]
    parts = tuple(part for each in blocks for part in each.parts)
    joined = HeadMatrix(parts, np.concatenate(biases))
    inner = graph.multiply("state", "blocks", joined, bits, "blocks.inner")
    shape = graph.weight("head_rows", np.array([head.num_heads, head.hidden_size]))
    update = graph.add("Reshape", [graph.silu(inner, "blocks.silu"), shape], "update")
    return graph.add("Add", ["state", update], "states")


def _after_blocks(
    graph: HeadGraph, head: MedusaHead, matrices: Mapping[str, HeadMatrix], bits: int, index: int
) -> str:
    """z + SiLU(A z + b), block after block."""

    def after(state: str, block: int) -> str:
        name = f"{index}.{block}"
        inner = graph.multiply(state, name, matrices[name], bits, name + ".inner")
        return graph.add("Add", [state, graph.silu(inner, name + ".silu")], name + ".state")

    return reduce(after, range(len(head.blocks[index])), "state")
