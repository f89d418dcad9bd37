"""Writes the static layout (exporters/static_layout.py) as ONNX graphs, a graph a function.

Only standard operators, with every shape fixed. A graph does not write the cache, which no ONNX
operator does in place: it takes the states, attends to them and to its own rows side by side, and
returns what its rows add; the runtime writes that at write_slot. Inputs and outputs:

    input_ids          [1, rows] int32
    position_ids       [rows] int32
    past_mask          [1, 1, rows, slots] float32    what a row adds to its scores of each slot
    own_mask           [1, 1, rows, rows] float32     and of the rows of this pass
    past.N.key|value   [1, kv_heads, slots, head_dim]
    new.N.key|value    [1, kv_heads, rows, head_dim]
    logits             [rows, vocab] float32          of functions that score
    hidden             [rows, hidden_size] float32    of these, where it was asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.fitted_layers import input_importance
from edge_spec.exporters.onnx.nodes import DATA_FILE, Initializers, Nodes, tensor
from edge_spec.exporters.onnx.weights import (
    EMBEDDING,
    StaticFloats,
    StaticIntegers,
    StaticWeights,
)
from edge_spec.exporters.parity import against_reference
from edge_spec.exporters.requests import (
    BlockQuantization,
    chosen_quantization,
    describe,
    other_export,
    require_plain,
    require_replaceable,
    require_unchanged,
)
from edge_spec.exporters.static_layout import (
    BLOCK_SIZE,
    StaticFunction,
    StaticShape,
    chosen_context,
    functions,
    require_block_size,
    require_whole_blocks,
)
from edge_spec.models.bundle import open_bundle
from edge_spec.storage.atomic import atomic_directory

PARTS = ("key", "value")


@dataclass(frozen=True)
class StaticForm:
    """Describes what a compiler wants as one node, where standard operators are several.

    integers: how matrices of integers are multiplied. fuses_norms: whether a root mean square norm
    is SimplifiedLayerNormalization.
    """

    integers: type[StaticIntegers] = StaticIntegers
    fuses_norms: bool = False


STANDARD = StaticForm()


@dataclass(frozen=True, eq=False)
class StaticGraphs:
    """Builds the functions of one model over the same weights."""

    checkpoint: StoredCheckpoint
    weights: Initializers
    matrices: StaticWeights
    shape: StaticShape
    state: int  # the type of keys and values, float16 or float32
    hidden: bool
    fuses_norms: bool

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def build(self, function: StaticFunction, on_layer: Callable[[int], None]) -> ModelProto:
        return _Pass(self, function, on_layer).model()


class _Pass:
    """One function while it is built."""

    def __init__(
        self, graphs: StaticGraphs, function: StaticFunction, on_layer: Callable[[int], None]
    ) -> None:
        self._graphs = graphs
        self._on_layer = on_layer
        self._function = function
        self._rows = function.rows
        self._config: ModelConfig = graphs.config
        self._nodes = Nodes(graphs.weights)
        self._groups = self._config.num_heads // self._config.num_kv_heads

    def model(self) -> ModelProto:
        outputs = self._pass() + self._states("new", self._rows)
        return self._nodes.model(f"edge-spec {self._function.name}", self._inputs(), outputs)

    def _pass(self) -> list[ValueInfoProto]:
        """Adds the nodes; returns the outputs beside the new keys and values."""
        config, nodes = self._config, self._nodes
        self._cos, self._sin = (self._rotation(i, name) for i, name in enumerate(("cos", "sin")))
        self._masks = [self._for_groups(name) for name in ("past_mask", "own_mask")]
        x = self._graphs.matrices.embed(nodes, "input_ids")
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            keys, values = self._keys_and_values(normed, layer, prefix + "self_attn.")
            if layer + 1 == config.num_layers and not self._function.scores:
                return []  # of this layer, nobody reads more
            mixed = self._attention(normed, layer, keys, values)
            x = nodes.add("Add", [x, mixed], prefix + "attended")
            normed = self._norm(x, prefix + "post_attention_layernorm")
            x = nodes.add("Add", [x, self._mlp(normed, prefix + "mlp.")], prefix + "output")
            self._on_layer(layer)
        return self._scores(self._norm(x, "model.norm"))

    def _scores(self, x: str) -> list[ValueInfoProto]:
        config, rows = self._config, self._rows
        name = EMBEDDING if config.tied_embeddings else "lm_head.weight"
        hidden = self._reshape(x, (rows, config.hidden_size), "hidden")
        self._graphs.matrices.head(self._nodes, hidden, name, "logits")
        found = [tensor("logits", TensorProto.FLOAT, (rows, config.vocab_size))]
        if self._graphs.hidden:
            found.append(tensor("hidden", TensorProto.FLOAT, (rows, config.hidden_size)))
        return found

    def _rotation(self, which: int, name: str) -> str:
        """cos or sin of the rows' positions, [rows, head_dim / 2]."""
        tables = self._config.rotations[0].tables(self._graphs.shape.context_length)
        stored = self._nodes.weights.add(f"rope_{name}", tables[which])
        return self._nodes.add("Gather", [stored, "position_ids"], f"rotation_{name}")

    def _for_groups(self, mask: str) -> str:
        """The mask's rows once for each query of a group."""
        repeats = self._nodes.constant("groups", [1, 1, self._groups, 1])
        return self._nodes.add("Tile", [mask, repeats], mask + ".groups")

    def _keys_and_values(self, x: str, layer: int, prefix: str) -> list[str]:
        """Returns what attention reads of the rows' own; [1, kv_heads, rows, head_dim]."""
        count, nodes = self._config.num_kv_heads, self._nodes
        own = [self._heads(x, prefix, part, count) for part in "kv"]
        names = [f"new.{layer}.{part}" for part in PARTS]
        if self._graphs.state == TensorProto.FLOAT:
            return [
                nodes.add("Identity", [each], name) for each, name in zip(own, names, strict=True)
            ]
        # Rounded here, too: else a row's scores would depend on which pass its ancestors were in.
        for each, name in zip(own, names, strict=True):
            nodes.add("Cast", [each], name, to=self._graphs.state)
        return [self._widened(name) for name in names]

    def _widened(self, state: str) -> str:
        if self._graphs.state == TensorProto.FLOAT:
            return state
        return self._nodes.add("Cast", [state], state + ".float32", to=TensorProto.FLOAT)

    def _heads(self, x: str, prefix: str, part: str, count: int) -> str:
        """Queries, keys or values, [1, count, rows, head_dim], normed and rotated."""
        config, name = self._config, f"{prefix}{part}_proj"
        split = self._reshape(
            self._linear(x, name, config.qkv_bias),
            (1, self._rows, count, config.head_dim),
            name + ".split",
        )
        heads = self._nodes.add("Transpose", [split], name + ".heads", perm=[0, 2, 1, 3])
        if config.qk_norm and part in "qk":
            heads = self._norm(heads, f"{prefix}{part}_norm")
        return heads if part == "v" else self._rotate(heads, name)

    def _linear(self, x: str, name: str, has_bias: bool) -> str:
        product = self._graphs.matrices.linear(self._nodes, x, name + ".weight")
        if not has_bias:
            return product
        bias = self._vector(name + ".bias")
        return self._nodes.add("Add", [product, bias], name + ".biased")

    def _rotate(self, x: str, name: str) -> str:
        """x: [1, heads, rows, head_dim], halves paired (Su et al. 2021)."""
        nodes = self._nodes
        first, second = name + ".first", name + ".second"
        nodes.add("Split", [x], [first, second], axis=-1, num_outputs=2)

        def product(half: str, table: str) -> str:
            return nodes.add("Mul", [half, table], f"{half}.{table}")

        cos, sin = self._cos, self._sin
        low = nodes.add("Sub", [product(first, cos), product(second, sin)], name + ".low")
        high = nodes.add("Add", [product(second, cos), product(first, sin)], name + ".high")
        return nodes.add("Concat", [low, high], name + ".rotated", axis=-1)

    def _attention(self, x: str, layer: int, keys: str, values: str) -> str:
        config, nodes = self._config, self._nodes
        prefix = f"model.layers.{layer}.self_attn."
        # Query heads that share keys stand as further rows of one head: nothing is repeated.
        queries = self._reshape(
            self._scaled(self._heads(x, prefix, "q", config.num_heads), prefix),
            (1, config.num_kv_heads, self._groups * self._rows, config.head_dim),
            prefix + "queries",
        )
        past_keys, past_values = (self._widened(f"past.{layer}.{part}") for part in PARTS)
        scores = [
            self._masked_scores(queries, each, mask)
            for each, mask in zip((past_keys, keys), self._masks, strict=True)
        ]
        joined = nodes.add("Concat", scores, prefix + "scores", axis=-1)
        shares = nodes.add("Softmax", [joined], prefix + "shares", axis=-1)
        ends = [self._graphs.shape.slots, self._rows]
        sizes = nodes.constant(f"attended_{self._rows}", ends)
        past, own = prefix + "past_shares", prefix + "own_shares"
        nodes.add("Split", [shares, sizes], [past, own], axis=-1)
        parts = [
            nodes.add("MatMul", [past, past_values], prefix + "past_mixed"),
            nodes.add("MatMul", [own, values], prefix + "own_mixed"),
        ]
        mixed = nodes.add("Add", parts, prefix + "mixed")
        return self._linear(self._joined(mixed, prefix), prefix + "o_proj", config.output_bias)

    def _scaled(self, queries: str, prefix: str) -> str:
        """First: products then stay within float16."""
        scale = self._config.head_dim**-0.5
        stored = self._nodes.constant("attention_scale", scale, np.float32)
        return self._nodes.add("Mul", [queries, stored], prefix + "scaled")

    def _masked_scores(self, queries: str, keys: str, mask: str) -> str:
        nodes = self._nodes
        turned = nodes.add("Transpose", [keys], keys + ".turned", perm=[0, 1, 3, 2])
        products = nodes.add("MatMul", [queries, turned], keys + ".products")
        return nodes.add("Add", [products, mask], keys + ".scores")

    def _joined(self, mixed: str, prefix: str) -> str:
        config, rows = self._config, self._rows
        each = self._reshape(mixed, (1, config.num_heads, rows, config.head_dim), prefix + "each")
        turned = self._nodes.add("Transpose", [each], prefix + "turned", perm=[0, 2, 1, 3])
        return self._reshape(turned, (1, rows, config.query_size), prefix + "joined")

    def _mlp(self, x: str, prefix: str) -> str:
        nodes = self._nodes
        gate = self._linear(x, prefix + "gate_proj", False)
        share = nodes.add("Sigmoid", [gate], prefix + "share")
        activated = nodes.add("Mul", [gate, share], prefix + "activated")
        up = self._linear(x, prefix + "up_proj", False)
        product = nodes.add("Mul", [activated, up], prefix + "product")
        return self._linear(product, prefix + "down_proj", False)

    def _norm(self, x: str, name: str) -> str:
        """The nodes that compilers fuse to a root mean square norm (Zhang and Sennrich 2019)."""
        nodes = self._nodes
        if self._graphs.fuses_norms:
            return nodes.add(
                "SimplifiedLayerNormalization",
                [x, self._vector(name + ".weight")],
                name + ".output",
                axis=-1,
                epsilon=self._config.norm_epsilon,
            )
        two = nodes.constant("two", 2, np.float32)
        last = nodes.constant("last_axis", [-1])
        epsilon = nodes.constant("norm_epsilon", self._config.norm_epsilon, np.float32)
        squares = nodes.add("Pow", [x, two], name + ".squares")
        mean = nodes.add("ReduceMean", [squares, last], name + ".mean", keepdims=1)
        moved = nodes.add("Add", [mean, epsilon], name + ".moved")
        root = nodes.add("Sqrt", [moved], name + ".root")
        normed = nodes.add("Div", [x, root], name + ".normed")
        return nodes.add("Mul", [normed, self._vector(name + ".weight")], name + ".output")

    def _reshape(self, x: str, shape: tuple[int, ...], output: str) -> str:
        return self._nodes.reshape(x, "shape_" + "_".join(map(str, shape)), shape, output)

    def _vector(self, name: str) -> str:
        add = self._nodes.weights.add_made
        return add(name, lambda: self._graphs.checkpoint.float32(name))

    def _inputs(self) -> list[ValueInfoProto]:
        rows, slots = self._rows, self._graphs.shape.slots
        return [
            tensor("input_ids", TensorProto.INT32, (1, rows)),
            tensor("position_ids", TensorProto.INT32, (rows,)),
            tensor("past_mask", TensorProto.FLOAT, (1, 1, rows, slots)),
            tensor("own_mask", TensorProto.FLOAT, (1, 1, rows, rows)),
            *self._states("past", slots),
        ]

    def _states(self, when: str, length: int) -> list[ValueInfoProto]:
        config = self._config
        shape = (1, config.num_kv_heads, length, config.head_dim)
        return [
            tensor(f"{when}.{layer}.{part}", self._graphs.state, shape)
            for layer in range(config.num_layers)
            for part in PARTS
        ]


QUANTIZATIONS: Mapping[str, BlockQuantization] = {
    "fp16": BlockQuantization(16, 5e-3),
    "int4": BlockQuantization(4, 1.5),
    "int8": BlockQuantization(8, 0.1),
    "fp32": BlockQuantization(32, 1e-4),
}


class StaticOnnxExporter:
    format = "onnx-static"

    def __init__(self, form: StaticForm = STANDARD) -> None:
        self._form = form

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "static ONNX", other_export(checkpoint, "static"))

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes the bundle `out` and compares it with the reference.

        Raises UsageError for unknown options and where `out` must not be replaced,
        UnsupportedModelError for a model that it cannot write, ExportError beyond the
        quantization's bound; then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        name = _checked(checkpoint, out, options)
        checkpoint = first_layers(checkpoint, options.num_layers)
        shape = StaticShape.of(chosen_context(checkpoint.config, options.context_length))
        config = replace(checkpoint.config, context_length=shape.context_length)
        with atomic_directory(out) as work, require_unchanged(checkpoint.path):
            with (work / DATA_FILE).open("wb") as data:
                weights = Initializers(data)
                graphs = self._graphs(
                    checkpoint, weights, shape, name, options.hidden_states, progress
                )
                _write(graphs, work, progress)
            bound = QUANTIZATIONS[name].max_kl_divergence
            compared = against_reference(checkpoint, "ort", bound, progress)
            describe(
                work,
                checkpoint,
                config,
                format=self.format,
                quantization=f"int4 block {BLOCK_SIZE}" if name == "int4" else name,
                check=compared if options.check else None,
            )
        bundle = open_bundle(out)
        return ExportReport(out, bundle.num_bytes, bundle.manifest.parity)

    def _graphs(
        self,
        checkpoint: StoredCheckpoint,
        weights: Initializers,
        shape: StaticShape,
        quantization: str,
        hidden: bool,
        progress: Progress,
    ) -> StaticGraphs:
        state = np.float32 if quantization == "fp32" else np.float16
        matrices: StaticWeights
        if quantization in ("fp16", "fp32"):
            matrices = StaticFloats(checkpoint, state)
        else:
            bits = QUANTIZATIONS[quantization].bits
            importance = input_importance(checkpoint, progress) if bits == 4 else {}
            matrices = self._form.integers(checkpoint, weights, bits, importance)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(state))
        fuses = self._form.fuses_norms
        return StaticGraphs(checkpoint, weights, matrices, shape, kind, hidden, fuses)


def _write(graphs: StaticGraphs, work: Path, progress: Progress) -> None:
    """The first function stores all weights, but for constants of a width."""

    def written(layer: int) -> None:
        graphs.checkpoint.release_pages()
        progress("Converting the weights", (layer + 1) / graphs.config.num_layers)

    first, *others = functions()
    for function in (first, *others):
        model = graphs.build(function, written if function is first else lambda layer: None)
        (work / f"{function.name}.onnx").write_bytes(model.SerializeToString())


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> str:
    options.require_only(StaticOnnxExporter.format, "context_length", "hidden_states")
    name = chosen_quantization(options, QUANTIZATIONS)
    require_block_size(options, "Static bundles")
    require_replaceable(out)
    StaticOnnxExporter().require_exportable(checkpoint)
    if name == "int4":
        require_whole_blocks(checkpoint, "Export it with --quant int8 or fp16.")
    return name
