"""The graph of a decoder with its KV cache bound in place, for chains and trees.

Inputs and outputs (rows: tokens scored in this pass, attended: rows that attention computes,
total: cached tokens + attended):

    input_ids              [1, rows] int64
    attention_rows         [attended] int64         which row each attended one repeats
    kept_rows              [rows] int64             which attended row goes on as each row
    position_ids           [1, attended] int64      depth in the tree, from the cache's end
    attention_bias         [1, 1, attended, total]  0 where a row sees a position, -inf elsewhere
    seqlens_k              [1] int32                total - 1
    total_sequence_length  scalar int32             total
    logit_rows             [scored] int64       the rows that reach the head
    past.N.key|value       [1, kv_heads, capacity, head_dim]
    present.N.key|value    the same buffers
    logits                 [scored, vocab]
    hidden                 [scored, hidden]     after the final norm

Models whose keys are large have a second form of attention, with two more inputs, and so has the
decoder of an encoder-decoder (attention.py); layers with a convolution in the place of attention
have those of convolution.py.

In this one, a single row is attended twice. onnxruntime's CPU attention takes another kernel for
one row, whose last bits differ; int8 activations turn that into half a logit some layers later.
With two rows attended, and blocks of 32, a row's logits are bit-identical at every width that was
measured (edge_spec/scheduler/batch_invariance.py measures it again on each machine). It costs about
5 % of a plain step.

A sliding window is a second bias, made in the graph from `position_ids`: the operator's own counts
cached rows, among which those of a tree stand side by side.

Writes the embeddings and the scale of each layer that Gemma 4 has.

An embedding of a layer is a part of a row of one table of all layers, and of what one matrix makes
of the token's own embedding. It is added, behind a gate, to what the MLP leaves. That is no
sublayer that a draft may leave out (segments.py): it is part of what each layer does. What is
estimated there of how far a sublayer turns the stream does not know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Rotation
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import convolution
from edge_spec.exporters.onnx.attention import (
    STACKED_OPSET,
    Attention,
    cross_attention,
    norm,
    norm_vectors,
    pays_to_stack,
    relative_bias,
    source_values,
    stacked_inputs,
    vector,
)
from edge_spec.exporters.onnx.experts import ComposedMixture, Mixture
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes, activation, softcap, times, window_bias
from edge_spec.exporters.onnx.weights import EMBEDDING, OnnxWeights
from edge_spec.exporters.requests import is_composed


class Mlp:
    """Adds that of one layer after another. x: [1, rows, hidden] -> the same; prefix: of the names
    of the layer's tensors."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config

    def add(self, x: str, prefix: str) -> str:
        """Returns what the last matrix of an MLP makes."""
        nodes = self._nodes
        if not self._config.gated_mlp:
            up = self._linear(x, prefix + "up_proj")
            activated = activation(nodes, up, self._config.activation, prefix)
            return self._linear(activated, prefix + "down_proj")
        joined = self._weights.linear(
            x, [prefix + "gate_proj.weight", prefix + "up_proj.weight"], []
        )
        gate, up = prefix + "gate", prefix + "up"
        nodes.add("Split", [joined], [gate, up], axis=-1, num_outputs=2)
        activated = activation(nodes, gate, self._config.activation, prefix)
        product = nodes.add("Mul", [activated, up], prefix + "product")
        return self._weights.linear(product, [prefix + "down_proj.weight"], [])

    def add_experts(self, x: str, stream: str, prefix: str) -> str:
        """Returns what a layer's experts, and its MLP if any, make. stream: what x is
        a norm of."""
        experts = self._config.experts
        if experts is None or not experts.beside_mlp:
            return self._mixture(x, x, prefix)
        dense = self._norm(self.add(x, prefix), prefix + "dense_post_norm")
        routed = self._norm(stream, prefix + "router_norm")
        read = self._norm(stream, prefix + "experts_norm")
        mixed = self._norm(self._mixture(read, routed, prefix), prefix + "experts_post_norm")
        return self._nodes.add("Add", [dense, mixed], prefix + "both")

    def _mixture(self, x: str, routed: str, prefix: str) -> str:
        """routed: what the router reads."""
        if is_composed(self._config):
            composed = ComposedMixture(self._nodes, self._weights, self._checkpoint)
            return composed.add(x, routed, prefix)
        return Mixture(self._nodes, self._weights, self._checkpoint).add(x, prefix)

    def _linear(self, x: str, name: str) -> str:
        biases = [name + ".bias"] if self._config.mlp_bias else []
        return self._weights.linear(x, [name + ".weight"], biases)

    def _norm(self, x: str, name: str) -> str:
        return norm(self._nodes, self._checkpoint, x, name)


_PREFIX = "layer_inputs."


class LayerInputs:
    """Adds nothing where a model's layers have neither."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config: ModelConfig = checkpoint.config
        self._inputs: list[str] = []  # of each layer, [1, rows, size]

    def begin(self, embedded: str) -> None:
        """embedded: [1, rows, hidden], the stream before the first layer."""
        own, nodes = self._config.layer_embeddings, self._nodes
        if own is None:
            return
        stored = _PREFIX + "stored"
        self._weights.embed("input_ids", stored, "model.embed_tokens_per_layer.weight")
        stored = times(nodes, stored, own.scale, _PREFIX + "scaled")
        projected = self._weights.linear(embedded, ["model.per_layer_model_projection.weight"], [])
        projected = times(nodes, projected, own.projected_scale, _PREFIX + "projected")
        each = nodes.weights.add("layer_input_shape", np.array([1, 0, -1, own.size]))
        flat = nodes.weights.add("flat_shape", np.array([1, 0, -1]))
        apart = nodes.add("Reshape", [projected, each], _PREFIX + "apart")
        normed = norm(nodes, self._checkpoint, apart, "model.per_layer_projection_norm")
        normed = nodes.add("Reshape", [normed, flat], _PREFIX + "normed")
        both = nodes.add("Add", [normed, stored], _PREFIX + "sum")
        both = times(nodes, both, own.sum_scale, _PREFIX + "all")
        count = self._config.num_layers
        self._inputs = [f"{_PREFIX}{layer}" for layer in range(count)]
        nodes.add("Split", [both], self._inputs, axis=-1, num_outputs=count)

    def end_layer(self, layer: int, update: str, residual: str) -> tuple[str, str]:
        """update: what the layer's MLP adds to `residual`, both [1, rows, hidden]. Returns two that
        add up to the stream that the layer leaves."""
        nodes, prefix = self._nodes, f"model.layers.{layer}."
        if self._inputs:
            residual = nodes.add("Add", [update, residual], prefix + "stream")
            update = self._of_token(residual, prefix, self._inputs[layer])
        if not self._config.layer_scale:
            return update, residual
        scale = vector(nodes, self._checkpoint, prefix + "layer_scalar")
        return (
            nodes.add("Mul", [update, scale], prefix + "update.scaled"),
            nodes.add("Mul", [residual, scale], prefix + "stream.scaled"),
        )

    def _of_token(self, x: str, prefix: str, own: str) -> str:
        nodes = self._nodes
        gate = self._weights.linear(x, [prefix + "per_layer_input_gate.weight"], [])
        activated = activation(nodes, gate, self._config.activation, prefix + "per_layer_input.")
        product = nodes.add("Mul", [activated, own], prefix + "per_layer_input.product")
        update = self._weights.linear(product, [prefix + "per_layer_projection.weight"], [])
        return norm(nodes, self._checkpoint, update, prefix + "post_per_layer_input_norm")


OPSET = 21
IR_VERSION = 10
EMBEDDED = "embedded"  # the residual stream before the first sublayer


@dataclass(frozen=True)
class Sublayer:
    """An attention or an MLP: nodes that read a normed residual stream and add to it."""

    nodes: slice  # of the graph's list
    update: str  # what they add, [1, rows, hidden]
    layer: int | None  # whose part of the cache they write; None: an MLP's


class GraphBuilder:
    """Adds a whole model to `nodes`, reading matrices through `weights`."""

    def __init__(self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint) -> None:
        self.config = checkpoint.config
        self.nodes = nodes
        self.weights = weights
        self.checkpoint = checkpoint
        self._mlp = Mlp(nodes, weights, checkpoint)
        self.is_stacked = pays_to_stack(self.config)
        self.sublayers: list[Sublayer] = []  # in the order they run in, filled by `build`

    def build(self, on_layer: Callable[[int], None]) -> ModelProto:
        config, nodes = self.config, self.nodes
        tables = {each: self._rope_tables(i, each) for i, each in enumerate(config.rotations)}
        attention = Attention(nodes, self.weights, self.checkpoint, tables, self._biases())
        ancestors = convolution.nearest_first(nodes, config) if config.convolving else []
        convolutions = convolution.Convolution(nodes, self.weights, self.checkpoint, ancestors)
        residual = self._embed("model", self._row_positions())
        embeddings = LayerInputs(nodes, self.weights, self.checkpoint)
        embeddings.begin(residual)
        normed, residual = self._first_read(residual, "model.layers.0.input_layernorm")
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            start = len(nodes.protos)
            if config.kind(layer).convolution is None:
                attended = self._update(attention.add(normed, layer), prefix + "self_attn.")
            else:
                update = convolutions.add(normed, layer)
                attended = self._update(update, prefix + "conv.")
            self._ends_sublayer(start, attended, layer)
            if config.encoder is not None:
                normed, residual = self._add_and_norm(
                    attended, residual, prefix + "cross_attn.input_norm"
                )
                attended = cross_attention(nodes, self.weights, config, normed, layer)
            normed, residual = self._add_and_norm(
                attended, residual, prefix + "post_attention_layernorm"
            )
            start = len(nodes.protos)
            inner = prefix + "mlp."
            if config.mixes(layer):
                update = self._mlp.add_experts(normed, residual, inner)
            else:
                update = self._mlp.add(normed, inner)
            update = self._update(update, inner)
            self._ends_sublayer(start, update, None)
            update, residual = embeddings.end_layer(layer, update, residual)
            if layer + 1 < config.num_layers:
                following = f"model.layers.{layer + 1}.input_layernorm"
                normed, residual = self._add_and_norm(update, residual, following)
            on_layer(layer)
        self._scores(update, residual)
        return self._model()

    def _biases(self) -> dict[int | None, str]:
        """Returns what is added to scores, by the window of a layer; None: it sees all."""
        nodes, config, biases = self.nodes, self.config, {None: "attention_bias"}
        if config.relative_positions is not None:
            weight = self.checkpoint.float32("model.relative_bias.weight")
            biases[None] = relative_bias(nodes, config, weight)
        return biases | {window: window_bias(nodes, window) for window in config.windows}

    def _rope_tables(self, index: int, rotation: Rotation) -> list[str]:
        tables = rotation.tables(self.config.context_length)
        suffix = f".{index}" if index else ""
        return [
            self.nodes.weights.add(f"rope_{name}{suffix}", table)
            for name, table in zip(("cos", "sin"), tables, strict=True)
        ]

    def _embed(self, half: str, positions: str) -> str:
        """half: "model" or "encoder"; positions: the name of those of its rows, if it has a table
        of them."""
        scale, nodes = self.config.embedding_scale, self.nodes
        placed = EMBEDDED + ".placed" if self.config.input_norm else EMBEDDED
        has_table = self.config.position_table
        scaled = EMBEDDED + ".tokens" if has_table else placed
        output = scaled if scale == 1.0 else EMBEDDED + ".stored"
        self.weights.embed("input_ids", output)
        embedded = times(nodes, output, scale, scaled)
        if has_table:
            table = self._vector(f"{half}.embed_positions.weight")
            found = nodes.add("Gather", [table, positions], EMBEDDED + ".positions", axis=0)
            nodes.add("Add", [embedded, found], placed)
        return self._norm(placed, f"{half}.input_norm", EMBEDDED) if placed != EMBEDDED else placed

    def _row_positions(self) -> str:
        """[1, rows] of a decoder with a table of them."""
        if not self.config.position_table:
            return ""
        return self.nodes.add("Gather", ["position_ids", "kept_rows"], "row_positions", axis=1)

    def _first_read(self, residual: str, name: str) -> tuple[str, str]:
        """Returns what the first sublayer reads, and the stream that goes on."""
        config = self.config
        if config.norm_places == "after" or not config.embedding_norm:
            return residual, residual
        normed = self._norm(residual, name)
        return normed, normed if config.norm_places == "stream" else residual

    def _ends_sublayer(self, start: int, update: str, layer: int | None) -> None:
        self.sublayers.append(Sublayer(slice(start, len(self.nodes.protos)), update, layer))

    def _update(self, update: str, prefix: str) -> str:
        """Returns what a sublayer adds to the residual stream, of what its last matrix makes."""
        if self.config.norm_places in ("around", "after"):
            update = self._norm(update, prefix + "post_norm")
        return times(self.nodes, update, self.config.residual_scale, prefix + "update")

    def _norm(self, x: str, name: str, output: str = "") -> str:
        return norm(self.nodes, self.checkpoint, x, name, output)

    def _add_and_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """Returns what the next sublayer reads, x + residual or its norm, and that sum."""
        if self.config.norm_places == "after":
            both = self.nodes.add("Add", [x, residual], name + ".sum")
            return both, both
        outputs = [name + ".output", "", "", name + ".sum"]
        self._skip_norm([x, residual], name, outputs)
        return outputs[0], outputs[0 if self.config.norm_places == "stream" else 3]

    def _skip_norm(self, summands: list[str], name: str, outputs: list[str] | str) -> None:
        """Adds the norm of what two tensors add up to."""
        config = self.config
        self.nodes.add(
            "SkipLayerNormalization" if config.layer_norm else "SkipSimplifiedLayerNormalization",
            [*summands, *norm_vectors(self.nodes, self.checkpoint, name)],
            outputs,
            domain=CONTRIB,
            epsilon=config.norm_epsilon,
        )

    def _scores(self, update: str, residual: str) -> None:
        """Final norm and head, for the asked rows only."""
        nodes = self.nodes
        flat = nodes.weights.add("rows_shape", np.array([-1, self.config.hidden_size]))
        picked = []
        for name, tensor in (("update", update), ("residual", residual)):
            rows = nodes.add("Reshape", [tensor, flat], name + "_rows")
            picked.append(nodes.add("Gather", [rows, "logit_rows"], name + "_scored", axis=0))
        self._skip_norm(picked, "model.norm", "hidden")
        head = EMBEDDING if self.config.tied_embeddings else "lm_head.weight"
        scored = self._scored_names()
        if self.config.logit_bias:
            self.weights.head("hidden", head, "logits.unbiased")
            nodes.add("Add", ["logits.unbiased", self._vector("lm_head.bias")], scored[0])
        else:
            self.weights.head("hidden", head, scored[0])
        times(nodes, scored[0], self.config.logit_scale, scored[1])
        if self.config.logit_softcap is not None:
            softcap(nodes, scored[1], self.config.logit_softcap, "logits")

    def _scored_names(self) -> tuple[str, str]:
        """Returns what the head's products are called, and the same once they are scaled."""
        scaled = "logits" if self.config.logit_softcap is None else "logits.scaled"
        return (scaled if self.config.logit_scale == 1.0 else "logits.products"), scaled

    def _vector(self, name: str) -> str:
        return vector(self.nodes, self.checkpoint, name)

    def _model(self) -> ModelProto:
        config = self.config
        scored = [
            tensor("logits", TensorProto.FLOAT, ["scored", config.vocab_size]),
            tensor("hidden", TensorProto.FLOAT, ["scored", config.hidden_size]),
        ]
        inputs = [
            tensor("input_ids", TensorProto.INT64, [1, "rows"]),
            tensor("attention_rows", TensorProto.INT64, ["attended"]),
            tensor("kept_rows", TensorProto.INT64, ["rows"]),
            tensor("position_ids", TensorProto.INT64, [1, "attended"]),
            tensor("attention_bias", TensorProto.FLOAT, [1, 1, "attended", "total"]),
            tensor("seqlens_k", TensorProto.INT32, [1]),
            tensor("total_sequence_length", TensorProto.INT32, []),
            tensor("logit_rows", TensorProto.INT64, ["scored"]),
        ]
        if self.is_stacked:
            inputs += stacked_inputs()
        if config.encoder is not None:
            inputs += source_values(config)
        if config.convolving:
            inputs += convolution.inputs(config)
        graph = helper.make_graph(
            self.nodes.protos,
            "edge-spec",
            inputs + self._cache("past"),
            scored + self._cache("present"),
            self.nodes.weights.protos,
        )
        opset = STACKED_OPSET if self.is_stacked else OPSET
        opset = convolution.OPSET if config.convolving else opset
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edge-spec"
        )

    def _cache(self, when: str) -> list[ValueInfoProto]:
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self.config.num_layers)
            for part, shape in cache_shapes(self.config, layer).items()
        ]


def cache_shapes(config: ModelConfig, layer: int) -> dict[str, list[int | str]]:
    """Returns the shape of each part of a layer's cache, by what ends its name."""
    if config.kind(layer).convolution is not None:
        return {"gated": convolution.cache_shape(config)}
    if config.kv_source(layer) != layer:
        return {}
    heads = config.heads(layer)
    shape: list[int | str] = [1, heads.num_kv_heads, "capacity", heads.head_dim]
    return {"key": shape, "value": shape}


def tensor(name: str, kind: int, shape: list[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
