"""The graph of an encoder, over the same data file as its decoder's.

input_ids            [1, source] int64
cross.N.key|value    [1, heads, source, head_dim]    what layer N of the decoder attends to
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper

from edge_spec.exporters.onnx.attention import (
    attention_biases,
    attention_scale,
    head_bias,
    output_bias,
    source_values,
)
from edge_spec.exporters.onnx.graph import IR_VERSION, OPSET, GraphBuilder, tensor
from edge_spec.exporters.onnx.nodes import CONTRIB

ENCODER_FILE = "encoder.onnx"


class EncoderBuilder(GraphBuilder):
    """Adds an encoder to `nodes`, which are its own; its weights stand beside the decoder's."""

    def build_encoder(self) -> ModelProto:
        encoder = self.config.encoder
        assert encoder is not None
        positions = self._positions() if self._sees_positions else ""
        residual = self._embed("encoder", self._as_indices(positions))
        bias = self._relative_bias(positions)
        normed, residual = self._first_read(residual, "encoder.layers.0.input_layernorm")
        for layer in range(encoder.num_layers):
            prefix = f"encoder.layers.{layer}."
            update = self._self_attention(normed, prefix + "self_attn.", bias)
            normed, residual = self._add_and_norm(
                update, residual, prefix + "post_attention_layernorm"
            )
            inner = prefix + "mlp."
            update = self._update(self._mlp.add(normed, inner), inner)
            is_last = layer + 1 == encoder.num_layers
            following = f"encoder.layers.{layer + 1}.input_layernorm"
            normed, residual = self._add_and_norm(
                update, residual, "encoder.norm" if is_last else following
            )
        for layer in range(self.config.num_layers):
            self._keys_and_values(normed, layer)
        return self._encoder_model()

    @property
    def _sees_positions(self) -> bool:
        return self.config.position_table or self.config.relative_positions is not None

    def _positions(self) -> str:
        """[source] int32."""
        nodes, constant = self.nodes, self.nodes.weights.add
        count = nodes.add("Size", ["input_ids"], "source.count64")
        count = nodes.add("Cast", [count], "source.count", to=TensorProto.INT32)
        ends = [constant("range_start", np.array(0, np.int32)), count]
        ends.append(constant("range_step", np.array(1, np.int32)))
        return nodes.add("Range", ends, "source.positions")

    def _as_indices(self, positions: str) -> str:
        """Casts to int64: onnxruntime 1.32 makes a Slice that fails of a Gather by int32."""
        if not self.config.position_table:
            return ""
        return self.nodes.add("Cast", [positions], "source.indices", to=TensorProto.INT64)

    def _relative_bias(self, keys: str) -> str:
        """[1, heads, source, source], the same for all layers; "" where there is none. keys: the
        name of their positions."""
        relative, nodes = self.config.relative_positions, self.nodes
        if relative is None:
            return ""
        constant = nodes.weights.add
        last = constant("last_axis", np.array(-1))
        rows = nodes.add("Unsqueeze", [keys, last], "source.rows")
        far = constant("source.far", np.array(relative.max_distance, np.int32))
        shifted = nodes.add("Add", [keys, far], "source.shifted")
        after = nodes.add("Sub", [shifted, rows], "source.after")
        weight = self.checkpoint.float32("encoder.relative_bias.weight")
        return head_bias(nodes, "source.", after, weight[relative.buckets(both_ways=True)])

    def _self_attention(self, x: str, prefix: str, bias: str) -> str:
        nodes, config = self.nodes, self.config
        names = [f"{prefix}{part}_proj.weight" for part in "qkv"]
        packed = self.weights.linear(x, names, attention_biases(config, prefix))
        parts = [f"{prefix}{part}.split" for part in "qkv"]
        nodes.add("Split", [packed], parts, axis=-1, num_outputs=3)
        mixed = nodes.add(
            "MultiHeadAttention",
            [*parts, "", "", bias] if bias else parts,
            prefix + "mixed",
            domain=CONTRIB,
            num_heads=config.num_heads,
            scale=attention_scale(config),
        )
        return self.weights.linear(mixed, [prefix + "o_proj.weight"], output_bias(config, prefix))

    def _keys_and_values(self, x: str, layer: int) -> None:
        """Writes what one layer of the decoder attends to."""
        nodes, prefix = self.nodes, f"model.layers.{layer}.cross_attn."
        shape = np.array([1, -1, self.config.num_heads, self.config.head_dim])
        heads = nodes.weights.add("source_shape", shape)
        for part, name in (("key", "k"), ("value", "v")):
            bias = attention_biases(self.config, prefix, name)
            projected = self.weights.linear(x, [f"{prefix}{name}_proj.weight"], bias)
            split = nodes.add("Reshape", [projected, heads], f"{prefix}{name}.heads")
            nodes.add("Transpose", [split], f"cross.{layer}.{part}", perm=[0, 2, 1, 3])

    def _encoder_model(self) -> ModelProto:
        used = {name for node in self.nodes.protos for name in node.input}
        graph = helper.make_graph(
            self.nodes.protos,
            "edge-spec-encoder",
            [tensor("input_ids", TensorProto.INT64, [1, "source"])],
            source_values(self.config),
            [proto for proto in self.nodes.weights.protos if proto.name in used],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edge-spec"
        )
