"""The graph of an encoder, over the same data file as its decoder's.

input_ids            [1, source] int64
cross.N.key|value    [1, heads, source, head_dim]    what layer N of the decoder attends to
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto

from edge_spec.exporters.onnx.attention import head_bias, multi_head_attention, source_values
from edge_spec.exporters.onnx.emitter import count_up
from edge_spec.exporters.onnx.graph import GraphBuilder, mlp
from edge_spec.exporters.onnx.nodes import tensor

ENCODER_FILE = "encoder.onnx"


class EncoderBuilder(GraphBuilder):
    """Adds an encoder to a graph of its own, whose weights stand beside the decoder's."""

    def build_encoder(self) -> ModelProto:
        encoder, config, graph = self.config.encoder, self.config, self.graph
        assert encoder is not None
        positions = ""
        if config.position_table or config.relative_positions is not None:
            count = graph.add("Size", ["input_ids"], "source.count64")
            count = graph.add("Cast", [count], "source.count", to=TensorProto.INT32)
            positions = count_up(graph, count, "source.positions")
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
            update = self._update(mlp(graph, normed, inner), inner)
            is_last = layer + 1 == encoder.num_layers
            following = f"encoder.layers.{layer + 1}.input_layernorm"
            normed, residual = self._add_and_norm(
                update, residual, "encoder.norm" if is_last else following
            )
        for layer in range(config.num_layers):
            self._keys_and_values(normed, layer)
        source = [tensor("input_ids", TensorProto.INT64, [1, "source"])]
        return graph.model("edge-spec-encoder", source, source_values(config))

    def _as_indices(self, positions: str) -> str:
        """Casts to int64: onnxruntime 1.32 makes a Slice that fails of a Gather by int32."""
        if not self.config.position_table:
            return ""
        return self.graph.add("Cast", [positions], "source.indices", to=TensorProto.INT64)

    def _relative_bias(self, keys: str) -> str:
        """[1, heads, source, source], the same for all layers; "" where there is none. keys: the
        name of their positions."""
        relative, graph = self.config.relative_positions, self.graph
        if relative is None:
            return ""
        rows = graph.add("Unsqueeze", [keys, graph.constant("last_axis", -1)], "source.rows")
        far = graph.constant("source.far", relative.max_distance, np.int32)
        shifted = graph.add("Add", [keys, far], "source.shifted")
        after = graph.add("Sub", [shifted, rows], "source.after")
        weight = graph.checkpoint.float32("encoder.relative_bias.weight")
        return head_bias(graph, "source.", after, weight[relative.buckets(both_ways=True)])

    def _self_attention(self, x: str, prefix: str, bias: str) -> str:
        graph, config = self.graph, self.config
        packed = graph.linear(x, prefix, ["q_proj", "k_proj", "v_proj"], config.qkv_bias)
        parts = [f"{prefix}{part}.split" for part in "qkv"]
        graph.add("Split", [packed], parts, axis=-1, num_outputs=3)
        mixed = multi_head_attention(
            graph, [*parts, "", "", bias] if bias else parts, prefix + "mixed"
        )
        return graph.linear(mixed, prefix, ["o_proj"], config.output_bias)

    def _keys_and_values(self, x: str, layer: int) -> None:
        """Writes what one layer of the decoder attends to."""
        graph, config, prefix = self.graph, self.config, f"model.layers.{layer}.cross_attn."
        heads = graph.constant("source_shape", [1, -1, config.num_heads, config.head_dim])
        for part, name in (("key", "k"), ("value", "v")):
            projected = graph.linear(x, prefix, [f"{name}_proj"], config.qkv_bias)
            split = graph.add("Reshape", [projected, heads], f"{prefix}{name}.heads")
            graph.add("Transpose", [split], f"cross.{layer}.{part}", perm=[0, 2, 1, 3])
