"""The graphs of a decoder, with its KV cache bound in place, and of an encoder.

A single row is attended twice. onnxruntime's CPU attention uses another kernel for one row, whose
last bits differ; int8 activations turn that into half a logit some layers later. With two, logits
were bit-identical at every measured width (edge_spec/scheduler/batch_invariance.py measures each
machine). It costs about 5 % of a plain step.

A sliding window is a second bias, from `position_ids`: the operator's own counts cached rows, among
which a tree's are side by side. Layer embeddings (Gemma 4) are added through a gate to the MLP's
output; they are no sublayer that a draft may skip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.decoder_walk import EMBEDDED
from edge_spec.exporters.onnx.attention import (
    SCATTER_OPSET,
    AttentionGraph,
    convolution_inputs,
    pays_to_stack,
    source_values,
    stacked_inputs,
)
from edge_spec.exporters.onnx.emitter import count_up
from edge_spec.exporters.onnx.experts import ComposedMixture, Mixture, is_composed
from edge_spec.exporters.onnx.nodes import OPSET, tensor

PARTIAL_FILE = "partial.onnx"
NO_UPDATE = "no_update"


@dataclass(frozen=True)
class Sublayer:
    """An attention or an MLP: nodes that read the normed residual stream and add to it."""

    nodes: slice  # of the graph's nodes
    update: str  # their output, [1, rows, hidden]
    layer: int | None  # that owns the cache they write; None: an MLP


class GraphBuilder(AttentionGraph):
    """Build the graph of a whole model."""

    _positions = ""  # of the rows, for a position table

    def build(self, on_layer: Callable[[int], None]) -> ModelProto:
        config = self.config
        self.sublayers: list[Sublayer] = []  # in execution order
        self.prepare_attention()
        if config.position_table:
            positions = ["position_ids", "kept_rows"]
            self._positions = self.add("Gather", positions, "row_positions", axis=1)
        residual = self.embed()
        inputs = self.layer_inputs(residual)
        update: str | None = None
        for layer in range(config.num_layers):
            update, residual = self.pass_layer(layer, update, residual, inputs)
            on_layer(layer)
        assert update is not None
        picked = []
        for name, stream in (("update", update), ("residual", residual)):
            rows = self.reshape(stream, "rows_shape", [-1, config.hidden_size], name + "_rows")
            picked.append(self.add("Gather", [rows, "logit_rows"], name + "_scored", axis=0))
        self.skip_norm(picked, "model.norm", "hidden")
        self.score("hidden")
        return self._model()

    def mix_rows(self, x: str, layer: int) -> str:
        start = len(self.protos)
        return self._ends_sublayer(start, super().mix_rows(x, layer), layer)

    def feed_forward(self, x: str, stream: str, layer: int) -> str:
        start = len(self.protos)
        return self._ends_sublayer(start, super().feed_forward(x, stream, layer), None)

    def _ends_sublayer(self, start: int, update: str, layer: int | None) -> str:
        self.sublayers.append(Sublayer(slice(start, len(self.protos)), update, layer))
        return update

    def look_up(self, table: str, output: str) -> str:
        if table.endswith("embed_positions.weight"):
            return self.add("Gather", [self.vector(table), self._positions], output, axis=0)
        self.matrices.embed("input_ids", output, table)
        return output

    def norm_inputs(self, x: str, name: str, output: str) -> str:
        own = self.config.layer_embeddings
        assert own is not None
        each = self.constant("layer_input_shape", [1, 0, -1, own.size])
        flat = self.constant("flat_shape", [1, 0, -1])
        apart = self.add("Reshape", [x, each], "layer_inputs.apart")
        return self.add("Reshape", [self.norm(apart, name), flat], output)

    def split_inputs(self, x: str, outputs: Sequence[str]) -> Sequence[str]:
        self.add("Split", [x], outputs, axis=-1, num_outputs=len(outputs))
        return outputs

    def scale_layer(self, update: str, residual: str, prefix: str) -> tuple[str, str]:
        scale = self.vector(prefix + "layer_scalar")
        return (
            self.product(update, scale, prefix + "update.scaled"),
            self.product(residual, scale, prefix + "stream.scaled"),
        )

    def add_and_norm(self, update: str | None, residual: str, name: str) -> tuple[str, str]:
        if update is None:
            return self.norm(residual, name), residual
        outputs = [name + ".output", "", "", name + ".sum"]
        self.skip_norm([update, residual], name, outputs)
        return outputs[0], outputs[3]

    def gate(self, x: str, prefix: str) -> str:
        joined = self.linear(x, prefix, ["gate_proj", "up_proj"])
        gate, up = prefix + "gate", prefix + "up"
        self.add("Split", [joined], [gate, up], axis=-1, num_outputs=2)
        return self.product(self.activation(gate, prefix), up, prefix + "product")

    def mix_experts(self, x: str, routed: str, prefix: str) -> str:
        if is_composed(self.config):
            return ComposedMixture(self, prefix).add(x, routed)
        return Mixture(self, prefix).add(x)

    def head(self, hidden: str, output: str) -> str:
        self.matrices.head(hidden, self.head_name, output)
        return output

    def partial(self) -> ModelProto:
        """Return a model whose sublayers can be skipped, for drafts by a part of the target.
        Consumes the nodes.

        In this second graph over the same data file, each attention and each MLP is a branch of an
        `If`. Norms and residual sums stay outside, so a pass that skips nothing equals the whole
        graph bit for bit. Skipping all sublayers of the last layers is an early exit. Further
        inputs and outputs, with K = 2 * layer for an attention and 2 * layer + 1 for an MLP:

            runs.K     [1] bool              whether the sublayer runs
            no_update  [1, rows, hidden]     zeros, the output of a skipped sublayer
            embedded   [1, rows, hidden]     the residual stream before the first sublayer
            update.K   [1, rows, hidden]     the output of each sublayer

        A skipped sublayer passes its cache through, bound in place. The verifying graph has no
        `If`, which costs time even if its branch is taken.
        """
        whole, done = self.protos, 0
        self.protos = []
        weights = {proto.name for proto in self.weights.protos}
        for index, sublayer in enumerate(self.sublayers):
            self.protos += whole[done : sublayer.nodes.start]
            done = sublayer.nodes.stop
            own = whole[sublayer.nodes]
            # Widen stored weights outside of branches, so that it happens once, at loading.
            self.protos += [node for node in own if weights.issuperset(node.input)]
            inner = [node for node in own if not weights.issuperset(node.input)]
            self._add_optional(index, sublayer, inner)
        self.protos += whole[done:]
        updates = [f"update.{index}" for index in range(len(self.sublayers))]
        renamed = {each.update: name for each, name in zip(self.sublayers, updates, strict=True)}
        for node in self.protos:
            node.input[:] = [renamed.get(name, name) for name in node.input]
        runs = [f"runs.{index}" for index in range(len(updates))]
        stream: list[int | str] = [1, "rows", self.config.hidden_size]
        return self._model(
            [
                *(tensor(name, TensorProto.BOOL, [1]) for name in runs),
                tensor(NO_UPDATE, TensorProto.FLOAT, stream),
            ],
            [tensor(name, TensorProto.FLOAT, stream) for name in (*updates, EMBEDDED)],
        )

    def _add_optional(self, index: int, sublayer: Sublayer, nodes: list[NodeProto]) -> None:
        """Add an `If` that runs the nodes, or adds nothing and keeps the cache."""
        update = f"update.{index}"
        produced = {sublayer.update: update}
        kept = {NO_UPDATE: update}
        shapes: dict[str, list[int | str]] = {update: [1, "rows", self.config.hidden_size]}
        if sublayer.layer is not None:
            for part, shape in cache_shapes(self.config, sublayer.layer).items():
                present = f"present.{sublayer.layer}.{part}"
                produced[present] = present
                kept[f"past.{sublayer.layer}.{part}"] = present
                shapes[present] = shape
        for node in nodes:
            for names in (node.output, node.input):  # a convolution reads the cache that it wrote
                names[:] = [produced[n] + ".run" if n in produced else n for n in names]
        passed = [
            helper.make_node("Identity", [source], [output + ".left"])
            for source, output in kept.items()
        ]

        def branch(name: str, inner: list[NodeProto], end: str) -> GraphProto:
            kind = TensorProto.FLOAT
            outputs = [tensor(output + end, kind, shape) for output, shape in shapes.items()]
            return helper.make_graph(inner, f"{name}.{index}", [], outputs)

        branches = {
            "then_branch": branch("run", nodes, ".run"),
            "else_branch": branch("left", passed, ".left"),
        }
        node = helper.make_node("If", [f"runs.{index}"], list(shapes), update, **branches)
        self.protos.append(node)

    def _model(
        self,
        more_inputs: Sequence[ValueInfoProto] = (),
        more_outputs: Sequence[ValueInfoProto] = (),
    ) -> ModelProto:
        """rows: scored tokens; attended: rows of attention; total: cached tokens and attended
        rows."""
        config, opset, kinds = self.config, OPSET, TensorProto
        inputs = [
            tensor("input_ids", kinds.INT64, [1, "rows"]),
            # The row that each attended row repeats, and the attended row that continues each row.
            tensor("attention_rows", kinds.INT64, ["attended"]),
            tensor("kept_rows", kinds.INT64, ["rows"]),
            # Cached tokens + depth in the tree.
            tensor("position_ids", kinds.INT64, [1, "attended"]),
            # 0 where a row sees a position, else -inf.
            tensor("attention_bias", kinds.FLOAT, [1, 1, "attended", "total"]),
            tensor("seqlens_k", kinds.INT32, [1]),  # total - 1
            tensor("total_sequence_length", kinds.INT32, []),
            tensor("logit_rows", kinds.INT64, ["scored"]),  # rows to score
        ]
        if pays_to_stack(config):
            inputs, opset = inputs + stacked_inputs(), SCATTER_OPSET
        if config.encoder is not None:
            inputs += source_values(config)
        if config.convolving:
            inputs, opset = inputs + convolution_inputs(config), SCATTER_OPSET
        inputs += [*self._cache("past"), *more_inputs]
        outputs = [
            tensor("logits", kinds.FLOAT, ["scored", config.vocab_size]),
            tensor("hidden", kinds.FLOAT, ["scored", config.hidden_size]),  # after the final norm
            *self._cache("present"),  # the inputs' buffers
            *more_outputs,
        ]
        return self.model("edge-spec", inputs, outputs, opset)

    def _cache(self, when: str) -> list[ValueInfoProto]:
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self.config.num_layers)
            for part, shape in cache_shapes(self.config, layer).items()
        ]


def cache_shapes(config: ModelConfig, layer: int) -> dict[str, list[int | str]]:
    """Return the shapes of a layer's cache, by their names' last part."""
    if config.kind(layer).convolution is not None:
        return {"gated": [1, 1, "slots", config.hidden_size]}
    if config.kv_source(layer) != layer:
        return {}
    heads = config.heads(layer)
    shape: list[int | str] = [1, heads.num_kv_heads, "capacity", heads.head_dim]
    return {"key": shape, "value": shape}


ENCODER_FILE = "encoder.onnx"


class EncoderBuilder(GraphBuilder):
    """Build an encoder's graph; its weights share the decoder's file."""

    def build_encoder(self) -> ModelProto:
        encoder, config = self.config.encoder, self.config
        assert encoder is not None
        positions = ""
        if config.position_table or config.relative_positions is not None:
            count = self.add("Size", ["input_ids"], "source.count64")
            count = self.add("Cast", [count], "source.count", to=TensorProto.INT32)
            positions = count_up(self, count, "source.positions")
        if config.position_table:
            # onnxruntime 1.32 turns a Gather by int32 into a Slice that fails.
            kind = TensorProto.INT64
            self._positions = self.add("Cast", [positions], "source.indices", to=kind)
        residual = self.embed("encoder")
        self._bias = self._relative_bias(positions)
        update: str | None = None
        for layer in range(encoder.num_layers):
            update, residual = self.pass_encoder_layer(layer, update, residual)
        normed, _ = self.read(update, residual, "encoder.norm")
        for layer in range(config.num_layers):
            self._keys_and_values(normed, layer)
        source = [tensor("input_ids", TensorProto.INT64, [1, "source"])]
        return self.model("edge-spec-encoder", source, source_values(config))

    def _relative_bias(self, keys: str) -> str:
        """Return [1, heads, source, source] for all layers, or "". keys: name of their
        positions."""
        relative = self.config.relative_positions
        if relative is None:
            return ""
        rows = self.add("Unsqueeze", [keys, self.constant("last_axis", -1)], "source.rows")
        far = self.constant("source.far", relative.max_distance, np.int32)
        shifted = self.add("Add", [keys, far], "source.shifted")
        after = self.add("Sub", [shifted, rows], "source.after")
        weight = self.checkpoint.float32("encoder.relative_bias.weight")
        return self.head_bias("source.", after, weight[relative.buckets(both_ways=True)])

    def attend_all(self, x: str, prefix: str) -> str:
        config, bias = self.config, self._bias
        packed = self.linear(x, prefix, ["q_proj", "k_proj", "v_proj"], config.qkv_bias)
        parts = [f"{prefix}{part}.split" for part in "qkv"]
        self.add("Split", [packed], parts, axis=-1, num_outputs=3)
        inputs = [*parts, "", "", bias] if bias else parts
        mixed = self.attend_everywhere(inputs, prefix + "mixed")
        return self.linear(mixed, prefix, ["o_proj"], config.output_bias)

    def _keys_and_values(self, x: str, layer: int) -> None:
        config, prefix = self.config, f"model.layers.{layer}.cross_attn."
        heads = self.constant("source_shape", [1, -1, config.num_heads, config.head_dim])
        for part, name in (("key", "k"), ("value", "v")):
            projected = self.linear(x, prefix, [f"{name}_proj"], config.qkv_bias)
            split = self.add("Reshape", [projected, heads], f"{prefix}{name}.heads")
            self.add("Transpose", [split], f"cross.{layer}.{part}", perm=[0, 2, 1, 3])
