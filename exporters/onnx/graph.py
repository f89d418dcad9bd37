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
decoder of an encoder-decoder; layers with a convolution in the place of attention have inputs of
their own (all in attention.py).

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
sublayer that a draft may leave out (`partial`): it is part of what each layer does. What is
estimated there of how far a sublayer turns the stream does not know of it.

The graph of an encoder, over the same data file as its decoder's:

    input_ids            [1, source] int64
    cross.N.key|value    [1, heads, source, head_dim]    what layer N of the decoder attends to
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Rotation
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.attention import (
    SCATTER_OPSET,
    Attention,
    convolution,
    convolution_inputs,
    cross_attention,
    head_bias,
    multi_head_attention,
    nearest_first,
    pays_to_stack,
    relative_bias,
    source_values,
    stacked_inputs,
)
from edge_spec.exporters.onnx.emitter import Emitter, count_up, window_bias
from edge_spec.exporters.onnx.experts import ComposedMixture, Mixture
from edge_spec.exporters.onnx.nodes import OPSET, Initializers, tensor
from edge_spec.exporters.requests import is_composed


def mlp(graph: Emitter, x: str, prefix: str) -> str:
    """Returns what the last matrix of an MLP makes, [1, rows, hidden] as x. prefix: of the names of
    the layer's tensors."""
    config = graph.config
    if not config.gated_mlp:
        up = graph.linear(x, prefix, ["up_proj"], config.mlp_bias)
        return graph.linear(graph.activation(up, prefix), prefix, ["down_proj"], config.mlp_bias)
    joined = graph.linear(x, prefix, ["gate_proj", "up_proj"])
    gate, up = prefix + "gate", prefix + "up"
    graph.add("Split", [joined], [gate, up], axis=-1, num_outputs=2)
    product = graph.add("Mul", [graph.activation(gate, prefix), up], prefix + "product")
    return graph.linear(product, prefix, ["down_proj"])


def mlp_of_experts(graph: Emitter, x: str, stream: str, prefix: str) -> str:
    """Returns what a layer's experts, and its MLP if any, make. stream: what x is a norm of."""
    experts = graph.config.experts
    if experts is None or not experts.beside_mlp:
        return _mixture(graph, x, x, prefix)
    dense = graph.norm(mlp(graph, x, prefix), prefix + "dense_post_norm")
    routed = graph.norm(stream, prefix + "router_norm")
    read = graph.norm(stream, prefix + "experts_norm")
    mixed = graph.norm(_mixture(graph, read, routed, prefix), prefix + "experts_post_norm")
    return graph.add("Add", [dense, mixed], prefix + "both")


def _mixture(graph: Emitter, x: str, routed: str, prefix: str) -> str:
    """routed: what the router reads."""
    if is_composed(graph.config):
        return ComposedMixture(graph, prefix).add(x, routed)
    return Mixture(graph, prefix).add(x)


_PREFIX = "layer_inputs."


class LayerInputs:
    """Adds nothing where a model's layers have neither. embedded: [1, rows, hidden], the stream
    before the first layer."""

    def __init__(self, graph: Emitter, embedded: str) -> None:
        self._graph, self._config = graph, graph.config
        self._inputs: list[str] = []  # of each layer, [1, rows, size]
        own = graph.config.layer_embeddings
        if own is None:
            return
        stored = _PREFIX + "stored"
        graph.matrices.embed("input_ids", stored, "model.embed_tokens_per_layer.weight")
        stored = graph.times(stored, own.scale, _PREFIX + "scaled")
        projected = graph.linear(embedded, "model.", ["per_layer_model_projection"])
        projected = graph.times(projected, own.projected_scale, _PREFIX + "projected")
        each = graph.constant("layer_input_shape", [1, 0, -1, own.size])
        flat = graph.constant("flat_shape", [1, 0, -1])
        apart = graph.add("Reshape", [projected, each], _PREFIX + "apart")
        normed = graph.norm(apart, "model.per_layer_projection_norm")
        normed = graph.add("Reshape", [normed, flat], _PREFIX + "normed")
        both = graph.add("Add", [normed, stored], _PREFIX + "sum")
        both = graph.times(both, own.sum_scale, _PREFIX + "all")
        count = self._config.num_layers
        self._inputs = [f"{_PREFIX}{layer}" for layer in range(count)]
        graph.add("Split", [both], self._inputs, axis=-1, num_outputs=count)

    def end_layer(self, layer: int, update: str, residual: str) -> tuple[str, str]:
        """update: what the layer's MLP adds to `residual`, both [1, rows, hidden]. Returns two that
        add up to the stream that the layer leaves."""
        graph, prefix = self._graph, f"model.layers.{layer}."
        if self._inputs:
            residual = graph.add("Add", [update, residual], prefix + "stream")
            update = self._of_token(residual, prefix, self._inputs[layer])
        if not self._config.layer_scale:
            return update, residual
        scale = graph.vector(prefix + "layer_scalar")
        return (
            graph.add("Mul", [update, scale], prefix + "update.scaled"),
            graph.add("Mul", [residual, scale], prefix + "stream.scaled"),
        )

    def _of_token(self, x: str, prefix: str, own: str) -> str:
        graph = self._graph
        gate = graph.linear(x, prefix, ["per_layer_input_gate"])
        activated = graph.activation(gate, prefix + "per_layer_input.")
        product = graph.add("Mul", [activated, own], prefix + "per_layer_input.product")
        update = graph.linear(product, prefix, ["per_layer_projection"])
        return graph.norm(update, prefix + "post_per_layer_input_norm")


PARTIAL_FILE = "partial.onnx"
NO_UPDATE = "no_update"
EMBEDDED = "embedded"  # the residual stream before the first sublayer


@dataclass(frozen=True)
class Sublayer:
    """An attention or an MLP: nodes that read a normed residual stream and add to it."""

    nodes: slice  # of the graph's list
    update: str  # what they add, [1, rows, hidden]
    layer: int | None  # whose part of the cache they write; None: an MLP's


class GraphBuilder(Emitter):
    """A graph to which a whole model is added."""

    def __init__(self, weights: Initializers, checkpoint: StoredCheckpoint) -> None:
        super().__init__(weights, checkpoint)
        self.sublayers: list[Sublayer] = []  # in the order they run in, filled by `build`

    def build(self, on_layer: Callable[[int], None]) -> ModelProto:
        config = self.config
        tables = {each: self._rope_tables(i, each) for i, each in enumerate(config.rotations)}
        attention = Attention(self, tables, self._biases())
        ancestors = nearest_first(self) if config.convolving else []
        residual = self._embed("model", self._row_positions())
        embeddings = LayerInputs(self, residual)
        normed, residual = self._first_read(residual, "model.layers.0.input_layernorm")
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            start = len(self.protos)
            if config.kind(layer).convolution is None:
                attended = self._update(attention.add(normed, layer), prefix + "self_attn.")
            else:
                update = convolution(self, normed, layer, ancestors)
                attended = self._update(update, prefix + "conv.")
            self._ends_sublayer(start, attended, layer)
            if config.encoder is not None:
                name = prefix + "cross_attn.input_norm"
                normed, residual = self._add_and_norm(attended, residual, name)
                attended = cross_attention(self, normed, layer)
            name = prefix + "post_attention_layernorm"
            normed, residual = self._add_and_norm(attended, residual, name)
            start = len(self.protos)
            inner = prefix + "mlp."
            if config.mixes(layer):
                update = mlp_of_experts(self, normed, residual, inner)
            else:
                update = mlp(self, normed, inner)
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
        biases = {None: "attention_bias"}
        if self.config.relative_positions is not None:
            biases[None] = relative_bias(self)
        return biases | {window: window_bias(self, window) for window in self.config.windows}

    def _rope_tables(self, index: int, rotation: Rotation) -> list[str]:
        tables = rotation.tables(self.config.context_length)
        suffix = f".{index}" if index else ""
        return [
            self.weights.add(f"rope_{name}{suffix}", table)
            for name, table in zip(("cos", "sin"), tables, strict=True)
        ]

    def _embed(self, half: str, positions: str) -> str:
        """half: "model" or "encoder"; positions: the name of those of its rows, if it has a table
        of them."""
        scale = self.config.embedding_scale
        placed = EMBEDDED + ".placed" if self.config.input_norm else EMBEDDED
        has_table = self.config.position_table
        scaled = EMBEDDED + ".tokens" if has_table else placed
        output = scaled if scale == 1.0 else EMBEDDED + ".stored"
        self.matrices.embed("input_ids", output)
        embedded = self.times(output, scale, scaled)
        if has_table:
            table = self.vector(f"{half}.embed_positions.weight")
            found = self.add("Gather", [table, positions], EMBEDDED + ".positions", axis=0)
            self.add("Add", [embedded, found], placed)
        if placed == EMBEDDED:
            return placed
        return self.norm(placed, f"{half}.input_norm", EMBEDDED)

    def _row_positions(self) -> str:
        """[1, rows] of a decoder with a table of them."""
        if not self.config.position_table:
            return ""
        return self.add("Gather", ["position_ids", "kept_rows"], "row_positions", axis=1)

    def _first_read(self, residual: str, name: str) -> tuple[str, str]:
        """Returns what the first sublayer reads, and the stream that goes on."""
        config = self.config
        if config.norm_places == "after" or not config.embedding_norm:
            return residual, residual
        normed = self.norm(residual, name)
        return normed, normed if config.norm_places == "stream" else residual

    def _ends_sublayer(self, start: int, update: str, layer: int | None) -> None:
        self.sublayers.append(Sublayer(slice(start, len(self.protos)), update, layer))

    def _update(self, update: str, prefix: str) -> str:
        """Returns what a sublayer adds to the residual stream, of what its last matrix makes."""
        if self.config.norm_places in ("around", "after"):
            update = self.norm(update, prefix + "post_norm")
        return self.times(update, self.config.residual_scale, prefix + "update")

    def _add_and_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """Returns what the next sublayer reads, x + residual or its norm, and that sum."""
        if self.config.norm_places == "after":
            both = self.add("Add", [x, residual], name + ".sum")
            return both, both
        outputs = [name + ".output", "", "", name + ".sum"]
        self.skip_norm([x, residual], name, outputs)
        return outputs[0], outputs[0 if self.config.norm_places == "stream" else 3]

    def _scores(self, update: str, residual: str) -> None:
        """Final norm and head, for the asked rows only."""
        config, picked = self.config, []
        for name, stream in (("update", update), ("residual", residual)):
            rows = self.reshape(stream, "rows_shape", [-1, config.hidden_size], name + "_rows")
            picked.append(self.add("Gather", [rows, "logit_rows"], name + "_scored", axis=0))
        self.skip_norm(picked, "model.norm", "hidden")
        scaled = "logits" if config.logit_softcap is None else "logits.scaled"
        products = scaled if config.logit_scale == 1.0 else "logits.products"
        scores = "logits.unbiased" if config.logit_bias else products
        self.matrices.head("hidden", self.head_name, scores)
        if config.logit_bias:
            self.add("Add", [scores, self.vector("lm_head.bias")], products)
        self.times(products, config.logit_scale, scaled)
        if config.logit_softcap is not None:
            self.softcap(scaled, config.logit_softcap, "logits")

    def partial(self) -> ModelProto:
        """Return the same model with sublayers that may be left out, for drafts that are a part of
        their target. It takes the nodes of the one that was built.

        A second graph over the same data file, in which each attention and each MLP is the branch
        of an `If`; norms and residual sums stay outside, so that a pass that leaves nothing out
        computes what the whole graph does, bit for bit. Leaving out all sublayers of the last
        layers is an early exit. More inputs and outputs than the whole graph has, with one K for
        each sublayer, 2 * layer its attention and 2 * layer + 1 its MLP:

            runs.K     [1] bool              whether the sublayer is run
            no_update  [1, rows, hidden]     zeros, what a sublayer that is left out adds
            embedded   [1, rows, hidden]     the residual stream before the first sublayer
            update.K   [1, rows, hidden]     what each sublayer adds to it

        A sublayer that is left out passes its keys and values through, which are bound in place.
        The graph that verifies has none of this: an `If` costs time even where its branch is taken.
        """
        whole, done = self.protos, 0
        self.protos = []
        weights = {proto.name for proto in self.weights.protos}
        for index, sublayer in enumerate(self.sublayers):
            self.protos += whole[done : sublayer.nodes.start]
            done = sublayer.nodes.stop
            own = whole[sublayer.nodes]
            # Widening a stored weight: outside of a branch it is done once, when the graph is
            # loaded.
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
        """An `If` that runs the nodes, or adds nothing and keeps the cache as it is."""
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
        config, opset = self.config, OPSET
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
        if pays_to_stack(config):
            inputs, opset = inputs + stacked_inputs(), SCATTER_OPSET
        if config.encoder is not None:
            inputs += source_values(config)
        if config.convolving:
            inputs, opset = inputs + convolution_inputs(config), SCATTER_OPSET
        inputs += [*self._cache("past"), *more_inputs]
        outputs = [*scored, *self._cache("present"), *more_outputs]
        return self.model("edge-spec", inputs, outputs, opset)

    def _cache(self, when: str) -> list[ValueInfoProto]:
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self.config.num_layers)
            for part, shape in cache_shapes(self.config, layer).items()
        ]


def cache_shapes(config: ModelConfig, layer: int) -> dict[str, list[int | str]]:
    """Returns the shape of each part of a layer's cache, by what ends its name."""
    if config.kind(layer).convolution is not None:
        return {"gated": [1, 1, "slots", config.hidden_size]}
    if config.kv_source(layer) != layer:
        return {}
    heads = config.heads(layer)
    shape: list[int | str] = [1, heads.num_kv_heads, "capacity", heads.head_dim]
    return {"key": shape, "value": shape}


ENCODER_FILE = "encoder.onnx"


class EncoderBuilder(GraphBuilder):
    """Adds an encoder to a graph of its own, whose weights stand beside the decoder's."""

    def build_encoder(self) -> ModelProto:
        encoder, config = self.config.encoder, self.config
        assert encoder is not None
        positions = ""
        if config.position_table or config.relative_positions is not None:
            count = self.add("Size", ["input_ids"], "source.count64")
            count = self.add("Cast", [count], "source.count", to=TensorProto.INT32)
            positions = count_up(self, count, "source.positions")
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
            update = self._update(mlp(self, normed, inner), inner)
            is_last = layer + 1 == encoder.num_layers
            following = f"encoder.layers.{layer + 1}.input_layernorm"
            normed, residual = self._add_and_norm(
                update, residual, "encoder.norm" if is_last else following
            )
        for layer in range(config.num_layers):
            self._keys_and_values(normed, layer)
        source = [tensor("input_ids", TensorProto.INT64, [1, "source"])]
        return self.model("edge-spec-encoder", source, source_values(config))

    def _as_indices(self, positions: str) -> str:
        """Casts to int64: onnxruntime 1.32 makes a Slice that fails of a Gather by int32."""
        if not self.config.position_table:
            return ""
        return self.add("Cast", [positions], "source.indices", to=TensorProto.INT64)

    def _relative_bias(self, keys: str) -> str:
        """[1, heads, source, source], the same for all layers; "" where there is none. keys: the
        name of their positions."""
        relative = self.config.relative_positions
        if relative is None:
            return ""
        rows = self.add("Unsqueeze", [keys, self.constant("last_axis", -1)], "source.rows")
        far = self.constant("source.far", relative.max_distance, np.int32)
        shifted = self.add("Add", [keys, far], "source.shifted")
        after = self.add("Sub", [shifted, rows], "source.after")
        weight = self.checkpoint.float32("encoder.relative_bias.weight")
        return head_bias(self, "source.", after, weight[relative.buckets(both_ways=True)])

    def _self_attention(self, x: str, prefix: str, bias: str) -> str:
        config = self.config
        packed = self.linear(x, prefix, ["q_proj", "k_proj", "v_proj"], config.qkv_bias)
        parts = [f"{prefix}{part}.split" for part in "qkv"]
        self.add("Split", [packed], parts, axis=-1, num_outputs=3)
        mixed = multi_head_attention(
            self, [*parts, "", "", bias] if bias else parts, prefix + "mixed"
        )
        return self.linear(mixed, prefix, ["o_proj"], config.output_bias)

    def _keys_and_values(self, x: str, layer: int) -> None:
        """Writes what one layer of the decoder attends to."""
        config, prefix = self.config, f"model.layers.{layer}.cross_attn."
        heads = self.constant("source_shape", [1, -1, config.num_heads, config.head_dim])
        for part, name in (("key", "k"), ("value", "v")):
            projected = self.linear(x, prefix, [f"{name}_proj"], config.qkv_bias)
            split = self.add("Reshape", [projected, heads], f"{prefix}{name}.heads")
            self.add("Transpose", [split], f"cross.{layer}.{part}", perm=[0, 2, 1, 3])
