"""The layers of a DFlash head as one graph, which reads a block and scores its rows.

Inputs and outputs (known: tokens of the text that are read with the block, and end before it):

    embedded            [1, block, hidden]      of the pending token and the masks after it
    found               [1, known, features]    the target's features
    position_ids        [1, known + block] int64
    block_position_ids  [1, block] int64        the last of these
    cos, sin            [positions, rotated / 2]
    attention_bias      [1, 1, 1, capacity]     0 where the block sees an entry, -inf elsewhere
    parts               [2] int64               known, block
    widths              [2] int64               capacity, known + block
    logit_rows          [scored] int64          the rows of the block that are scored
    past.N.key|value    [1, kv_heads, capacity, head_dim]
    made.N.key|value    [1, kv_heads, known, head_dim]  the entries of known tokens
    logits              [scored, vocab]
    likeliest, shares   see `HeadGraph.tell_likeliest`
    states              [scored, hidden]        that were scored, where the head reads more of them

Each row sees the whole block, so attention is none of a causal operator. As in
exporters/onnx/stacked.py, query heads that share keys are rows of one matrix. The cache is read
where it lies, with whatever is beyond its entries, which the bias hides; keys and values that the
pass makes stand apart, and only scores are put side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, ValueInfoProto

from edge_spec.core.heads import DFlashHead, HeadMatrix
from edge_spec.core.transitions import SHORTLIST
from edge_spec.exporters.heads.graph_parts import LIKELIEST
from edge_spec.exporters.heads.layers_graph import LayersGraph
from edge_spec.exporters.onnx.graph import tensor
from edge_spec.exporters.onnx.nodes import CONTRIB


class DFlashGraph(LayersGraph):
    def __init__(
        self, head: DFlashHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
    ) -> None:
        super().__init__(head, matrices, bits, weights)
        self._head = head

    def built(self) -> bytes:
        """Returns a serialized ModelProto, whose weights are written."""
        graph = self._graph
        context = self._norm(self._multiply("found", "fc"), "context_norm")
        stream = "embedded"
        for layer in range(self._config.num_layers):
            read = self._norm(stream, f"layers.{layer}.input_norm")
            stream = self._leave(stream, self._attend(context, read, layer), layer)
        picked = graph.add("Gather", [stream, "logit_rows"], "picked", axis=1)
        flat = graph.weight("rows_shape", np.array([-1, self._config.hidden_size]))
        scored = graph.add("Reshape", [self._norm(picked, "norm"), flat], "states")
        logits = self._multiply(scored, "head", "logits")
        ids, all_tokens = self._head.token_ids, self._config.vocab_size
        told = LIKELIEST if self._head.transitions is None else SHORTLIST
        num_scored = all_tokens if ids is None else len(ids)
        outputs = graph.tell_likeliest(logits, num_scored, told)
        if self._head.keeps_states:
            shape: list[int | str] = ["scored", self._config.hidden_size]
            outputs.append(tensor("states", TensorProto.FLOAT, shape))
        made = self._keys_values("made", "known")
        return graph.serialized("block", self._inputs(), [*outputs, *made])

    def _attend(self, context: str, read: str, layer: int) -> str:
        """[1, block, heads * head_dim]"""
        config, graph, prefix = self._config, self._graph, f"layers.{layer}."
        whole = self._matrices[prefix + "qkv"]
        query, beside = HeadMatrix(whole.parts[:1]), HeadMatrix(whole.parts[1:])
        graph.multiply(read, prefix + "q.weight", query, self._bits, prefix + "q")
        rows = graph.add("Concat", [context, read], prefix + "rows", axis=1)
        packed = graph.multiply(rows, prefix + "kv", beside, self._bits, prefix + "kv.output")
        parts = [prefix + "k", prefix + "v"]
        graph.add("Split", [packed], parts, axis=-1, num_outputs=2)
        queries = self._turned(prefix + "q", config.num_heads, "block_position_ids")
        keys = self._turned(prefix + "k", config.num_kv_heads, "position_ids")
        size = config.head_dim
        stacked = graph.add(
            "Reshape",
            [self._by_head(queries), graph.weight("stacked", [1, config.num_kv_heads, -1, size])],
            prefix + "stacked",
        )
        made = [self._by_head(each) for each in (keys, prefix + "v")]
        for part, entries in zip(("key", "value"), made, strict=True):
            names = [f"made.{layer}.{part}", f"{prefix}{part}.block"]
            graph.add("Split", [entries, "parts"], names, axis=2)
        mixed = self._mix(stacked, made, layer)
        apart = graph.add(
            "Reshape",
            [mixed, graph.weight("apart", [1, config.num_heads, -1, size])],
            prefix + "apart",
        )
        by_row = graph.add("Transpose", [apart], prefix + "by_row", perm=[0, 2, 1, 3])
        flat = graph.weight("flat_shape", [1, 0, -1])
        return graph.add("Reshape", [by_row, flat], prefix + "mixed")

    def _mix(self, queries: str, made: list[str], layer: int) -> str:
        """[1, kv_heads, stacked rows, head_dim] of what the cache has and what is made."""
        graph, prefix = self._graph, f"layers.{layer}."
        past = [f"past.{layer}.{part}" for part in ("key", "value")]
        scale = self._config.head_dim**-0.5

        def scores(keys: str, name: str) -> str:
            inputs, output = [queries, keys], prefix + name
            return graph.add("FusedMatMul", inputs, output, domain=CONTRIB, transB=1, alpha=scale)

        seen = graph.add(
            "Add", [scores(past[0], "past_scores"), "attention_bias"], prefix + "past_seen"
        )
        both = [seen, scores(made[0], "made_scores")]
        beside = graph.add("Concat", both, prefix + "scores", axis=-1)
        weights = graph.add("Softmax", [beside], prefix + "weights", axis=-1)
        parts = [prefix + "past_weights", prefix + "made_weights"]
        graph.add("Split", [weights, "widths"], parts, axis=-1)
        each = [
            graph.add("MatMul", [part, values], part + ".mixed")
            for part, values in zip(parts, (past[1], made[1]), strict=True)
        ]
        return graph.add("Add", each, prefix + "stacked.mixed")

    def _by_head(self, x: str) -> str:
        """[1, rows, heads * head_dim] -> [1, heads, rows, head_dim]"""
        graph = self._graph
        shape = graph.weight("head_shape", [1, 0, -1, self._config.head_dim])
        split = graph.add("Reshape", [x, shape], x + ".split")
        return graph.add("Transpose", [split], x + ".by_head", perm=[0, 2, 1, 3])

    def _inputs(self) -> list[ValueInfoProto]:
        kinds, size = TensorProto, self._config.hidden_size
        return [
            tensor("embedded", kinds.FLOAT, [1, "block", size]),
            tensor("found", kinds.FLOAT, [1, "known", "features"]),
            tensor("position_ids", kinds.INT64, [1, "rows"]),
            tensor("block_position_ids", kinds.INT64, [1, "block"]),
            *self._tables(),
            tensor("attention_bias", kinds.FLOAT, [1, 1, 1, "capacity"]),
            tensor("parts", kinds.INT64, [2]),
            tensor("widths", kinds.INT64, [2]),
            tensor("logit_rows", kinds.INT64, ["scored"]),
            *self._keys_values("past", "capacity"),
        ]
