"""Write the static layout (exporters/requests.py) as ONNX graphs, one per function, in standard
operators and fixed shapes.

No ONNX operator writes in place, so a graph attends to the past states and its own rows and returns
its keys and values; the runtime writes them at write_slot. NPU compilers read integers as
DequantizeLinear (ONNX opset 21): a scale per 4-bit block or per output channel of 8 bits. Functions
share tensors of one name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.exporters.block_quantize import (
    BlockQuantized,
    channels,
    quantize_stored,
    weigh_columns,
)
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.onnx.emitter import Emitter, FloatWeights, output_of
from edge_spec.exporters.onnx.nodes import DATA_FILE, Initializers, Nodes, tensor
from edge_spec.exporters.parity import against_reference, scores_by
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    BlockQuantization,
    StaticFunction,
    StaticShape,
    check_request,
    chosen_shape,
    describe,
    functions,
    report_bundle,
    require_plain,
    require_whole_blocks,
)
from edge_spec.storage.atomic import atomic_directory

PARTS = ("key", "value")


class StaticFloats(FloatWeights):
    """Store matrices as float16 or float32; multiply as float32."""

    def embed(self, ids: str, output: str, name: str) -> str:
        return self.widen(self.look_up(ids, name, output), output + ".float32")


class StaticIntegers:
    """Layers as 8-bit channels or symmetric 4-bit blocks; embedding and head, where few bits cost
    most, as 8-bit channels."""

    def __init__(self, checkpoint: StoredCheckpoint, nodes: Nodes, bits: int) -> None:
        self._checkpoint, self._nodes, self._bits = checkpoint, nodes, bits

    def linear(self, x: str, names: Sequence[str], biases: Sequence[str]) -> str:
        (name,) = names
        widened = self._blocks(name) if self._bits == 4 else self._channels(name)
        return self._nodes.add("MatMul", [x, widened], output_of(name))

    def embed(self, ids: str, output: str, name: str) -> str:
        nodes, (levels, scales) = self._nodes, self._table(name)
        column = nodes.constant("column_shape", [1, -1, 1])
        picked = nodes.add("Gather", [levels, ids], output + ".levels")
        floats = nodes.add("Cast", [picked], output + ".floats", to=TensorProto.FLOAT)
        scale = nodes.add("Gather", [scales, ids], output + ".scales")
        scale = nodes.add("Reshape", [scale, column], output + ".column")
        return nodes.add("Mul", [floats, scale], output)

    def head(self, hidden: str, name: str, output: str) -> None:
        inputs, widened = self._table(name), name + ".float32"
        self._nodes.add("DequantizeLinear", inputs, widened, axis=0)
        self._nodes.add("Gemm", [hidden, widened], output, transB=1)

    def _channels(self, name: str) -> str:
        inputs = self._table(name, is_turned=True)
        return self._nodes.add("DequantizeLinear", inputs, name + ".float32", axis=1)

    def _blocks(self, name: str) -> str:
        found, weights = cache(lambda: self.quantized(name)), self._nodes.weights  # at most once
        stored = weights.add_int4(name, lambda: found().levels().T.astype(np.int8) - 8)
        inputs = [stored, weights.add_made(name + ".scales", lambda: found().scales.T)]
        output, size = name + ".float32", BLOCK_SIZE
        return self._nodes.add("DequantizeLinear", inputs, output, axis=0, block_size=size)

    def quantized(self, name: str) -> BlockQuantized:
        return quantize_stored([self._checkpoint.tensors[name]], 4, symmetric=True)

    def _table(self, name: str, is_turned: bool = False) -> list[str]:
        """Return levels [out, in], or [in, out] if turned, and scales [out]."""
        found = cache(lambda: channels(self._checkpoint.float32(name)))
        add = self._nodes.weights.add_made
        return [
            add(name, lambda: found()[0].T if is_turned else found()[0]),
            add(name + ".scales", lambda: found()[1]),
        ]


class StaticPass(Emitter):
    """Build one function. state: the type of keys and values, float16 or float32."""

    static: StaticFloats | StaticIntegers  # instead of `matrices`

    def __init__(
        self,
        weights: Initializers,
        checkpoint: StoredCheckpoint,
        function: StaticFunction,
        shape: StaticShape,
        state: int,
        fuses_norms: bool,
    ) -> None:
        super().__init__(weights, checkpoint)
        self._function, self._rows = function, function.rows
        self._shape, self._state, self._fuses_norms = shape, state, fuses_norms
        self._groups = self.config.num_heads // self.config.num_kv_heads
        ends = ("attended", "output")
        layers = range(self.config.num_layers)
        self._sums = (f"model.layers.{layer}.{end}" for layer in layers for end in ends)

    def build(self, hidden: bool, on_layer: Callable[[int], None]) -> ModelProto:
        """hidden: also return the hidden states of scored rows."""
        outputs = self._pass(hidden, on_layer) + self._states("new", self._rows)
        return self.model(f"edge-spec {self._function.name}", self._inputs(), outputs)

    def _pass(self, hidden: bool, on_layer: Callable[[int], None]) -> list[ValueInfoProto]:
        config = self.config
        self._cos, self._sin = (self._rotation(i, name) for i, name in enumerate(("cos", "sin")))
        self._masks = [self._for_groups(name) for name in ("past_mask", "own_mask")]
        update: str | None = None
        residual = self.embed()
        for layer in range(config.num_layers):
            if layer + 1 == config.num_layers and not self._function.scores:
                normed, _ = self.read(update, residual, f"model.layers.{layer}.input_layernorm")
                self._keys_and_values(normed, layer)
                return []  # nothing else of the last layer is read
            update, residual = self.pass_layer(layer, update, residual)
            on_layer(layer)
        normed, _ = self.add_and_norm(update, residual, "model.norm")
        rows = self._reshaped(normed, (self._rows, config.hidden_size), "hidden")
        self.static.head(rows, self.head_name, "logits")
        sizes = {"logits": config.vocab_size} | ({"hidden": config.hidden_size} if hidden else {})
        kind = TensorProto.FLOAT
        return [tensor(name, kind, (self._rows, size)) for name, size in sizes.items()]

    def _rotation(self, which: int, name: str) -> str:
        """Return cos or sin of the rows' positions, [rows, head_dim / 2]."""
        tables = self.config.rotations[0].tables(self._shape.context_length)
        stored = self.weights.add(f"rope_{name}", tables[which])
        return self.add("Gather", [stored, "position_ids"], f"rotation_{name}")

    def _for_groups(self, mask: str) -> str:
        repeats = self.constant("groups", [1, 1, self._groups, 1])
        return self.add("Tile", [mask, repeats], mask + ".groups")

    def look_up(self, table: str, output: str) -> str:
        return self.static.embed("input_ids", output, table)

    def add_and_norm(self, update: str | None, residual: str, name: str) -> tuple[str, str]:
        if update is not None:
            residual = self.plus(residual, update, next(self._sums))
        return self.norm(residual, name), residual

    def _keys_and_values(self, x: str, layer: int) -> list[str]:
        """Return the rows' keys and values as attention reads them, [1, kv_heads, rows,
        head_dim]."""
        own = [self.heads(x, layer, part) for part in "kv"]
        names = [f"new.{layer}.{part}" for part in PARTS]
        if self._state == TensorProto.FLOAT:
            pairs = zip(own, names, strict=True)
            return [self.add("Identity", [each], name) for each, name in pairs]
        # Round them here too, or a row's scores would depend on which pass computed its ancestors.
        for each, name in zip(own, names, strict=True):
            self.add("Cast", [each], name, to=self._state)
        return [self._widened(name) for name in names]

    def _widened(self, state: str) -> str:
        if self._state == TensorProto.FLOAT:
            return state
        return self.add("Cast", [state], state + ".float32", to=TensorProto.FLOAT)

    def split_heads(self, x: str, layer: int, part: str) -> str:
        """Return [1, heads, rows, head_dim]."""
        config, name = self.config, f"model.layers.{layer}.self_attn.{part}_proj"
        count = config.num_heads if part == "q" else config.num_kv_heads
        split = self._reshaped(x, (1, self._rows, count, config.head_dim), name + ".split")
        return self.add("Transpose", [split], name + ".heads", perm=[0, 2, 1, 3])

    def linear(self, x: str, prefix: str, parts: Sequence[str], has_bias: bool = False) -> str:
        (name,) = (prefix + part for part in parts)
        product = self.static.linear(x, [name + ".weight"], [])
        if not has_bias:
            return product
        return self.plus(product, self.vector(name + ".bias"), name + ".biased")

    def rotate(self, x: str, layer: int, part: str) -> str:
        """Rotate x: [1, heads, rows, head_dim], pairing halves (Su et al. 2021)."""
        name = f"model.layers.{layer}.self_attn.{part}_proj"
        first, second = name + ".first", name + ".second"
        self.add("Split", [x], [first, second], axis=-1, num_outputs=2)

        def product(half: str, table: str) -> str:
            return self.add("Mul", [half, table], f"{half}.{table}")

        cos, sin = self._cos, self._sin
        low = self.add("Sub", [product(first, cos), product(second, sin)], name + ".low")
        high = self.add("Add", [product(second, cos), product(first, sin)], name + ".high")
        return self.add("Concat", [low, high], name + ".rotated", axis=-1)

    def attend(self, x: str, layer: int) -> str:
        config, prefix = self.config, f"model.layers.{layer}.self_attn."
        keys, values = self._keys_and_values(x, layer)
        # Query heads that share keys are extra rows of one head, so that no key is repeated.
        shape = (1, config.num_kv_heads, self._groups * self._rows, config.head_dim)
        # Scaled first, so that products stay within float16.
        queries = self.heads(x, layer, "q")
        scale = self.constant("attention_scale", config.head_dim**-0.5, np.float32)
        queries = self.add("Mul", [queries, scale], prefix + "scaled")
        queries = self._reshaped(queries, shape, prefix + "queries")
        past_keys, past_values = (self._widened(f"past.{layer}.{part}") for part in PARTS)
        scores = [
            self._masked_scores(queries, each, mask)
            for each, mask in zip((past_keys, keys), self._masks, strict=True)
        ]
        joined = self.add("Concat", scores, prefix + "scores", axis=-1)
        shares = self.add("Softmax", [joined], prefix + "shares", axis=-1)
        ends = [self._shape.slots, self._rows]
        sizes = self.constant(f"attended_{self._rows}", ends)
        past, own = prefix + "past_shares", prefix + "own_shares"
        self.add("Split", [shares, sizes], [past, own], axis=-1)
        parts = [
            self.add("MatMul", [past, past_values], prefix + "past_mixed"),
            self.add("MatMul", [own, values], prefix + "own_mixed"),
        ]
        mixed = self.add("Add", parts, prefix + "mixed")
        return self.linear(self._joined(mixed, prefix), prefix, ["o_proj"], config.output_bias)

    def _masked_scores(self, queries: str, keys: str, mask: str) -> str:
        turned = self.add("Transpose", [keys], keys + ".turned", perm=[0, 1, 3, 2])
        products = self.add("MatMul", [queries, turned], keys + ".products")
        return self.add("Add", [products, mask], keys + ".scores")

    def _joined(self, mixed: str, prefix: str) -> str:
        config, rows = self.config, self._rows
        each = self._reshaped(mixed, (1, config.num_heads, rows, config.head_dim), prefix + "each")
        turned = self.add("Transpose", [each], prefix + "turned", perm=[0, 2, 1, 3])
        return self._reshaped(turned, (1, rows, config.query_size), prefix + "joined")

    def activation(self, gate: str, prefix: str) -> str:
        share = self.add("Sigmoid", [gate], prefix + "share")
        return self.product(gate, share, prefix + "activated")

    def norm(self, x: str, name: str, output: str = "") -> str:
        """Write the nodes that compilers fuse to an RMS norm (Zhang and Sennrich 2019)."""
        if self._fuses_norms:
            return super().norm(x, name, output)
        two = self.constant("two", 2, np.float32)
        last = self.constant("last_axis", [-1])
        epsilon = self.constant("norm_epsilon", self.config.norm_epsilon, np.float32)
        squares = self.add("Pow", [x, two], name + ".squares")
        mean = self.add("ReduceMean", [squares, last], name + ".mean", keepdims=1)
        moved = self.add("Add", [mean, epsilon], name + ".moved")
        root = self.add("Sqrt", [moved], name + ".root")
        normed = self.add("Div", [x, root], name + ".normed")
        return self.add("Mul", [normed, self.vector(name + ".weight")], name + ".output")

    def _reshaped(self, x: str, shape: tuple[int, ...], output: str) -> str:
        return self.reshape(x, "shape_" + "_".join(map(str, shape)), shape, output)

    def _inputs(self) -> list[ValueInfoProto]:
        rows, slots = self._rows, self._shape.slots
        return [
            tensor("input_ids", TensorProto.INT32, (1, rows)),
            tensor("position_ids", TensorProto.INT32, (rows,)),
            # Added to a row's scores of each slot, and of this pass's rows.
            tensor("past_mask", TensorProto.FLOAT, (1, 1, rows, slots)),
            tensor("own_mask", TensorProto.FLOAT, (1, 1, rows, rows)),
            *self._states("past", slots),
        ]

    def _states(self, when: str, length: int) -> list[ValueInfoProto]:
        shape = (1, self.config.num_kv_heads, length, self.config.head_dim)
        return [
            tensor(f"{when}.{layer}.{part}", self._state, shape)
            for layer in range(self.config.num_layers)
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
    # What a compiler wants as one node.
    integers: type[StaticIntegers] = StaticIntegers  # multiplies by integer matrices
    fuses_norms = False  # an RMS norm is SimplifiedLayerNormalization

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "static ONNX")

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out` and compare it with the reference."""
        out = out.absolute()
        own_options = ("context_length", "hidden_states")
        name = check_request(self, checkpoint, out, options, QUANTIZATIONS, *own_options)
        if name == "int4":
            require_whole_blocks(checkpoint, "Export it with --quant int8 or fp16.")
        checkpoint = first_layers(checkpoint, options.num_layers)
        shape = chosen_shape(checkpoint.config, options.context_length)
        bound = QUANTIZATIONS[name].max_kl_divergence
        compared = against_reference(checkpoint, partial(scores_by, "ort"), bound, progress)
        bits = QUANTIZATIONS[name].bits
        floats = np.float32 if bits == 32 else np.float16
        state = helper.np_dtype_to_tensor_dtype(np.dtype(floats))
        checkpoint = weigh_columns(checkpoint, progress) if bits == 4 else checkpoint
        with atomic_directory(out) as work:
            on_layer, wanted = checkpoint.on_layer(progress), functions()
            with (work / DATA_FILE).open("wb") as data:
                weights = Initializers(data)
                for function in wanted:  # the first one stores all weights
                    graph = StaticPass(
                        weights, checkpoint, function, shape, state, self.fuses_norms
                    )
                    if bits > 8:
                        graph.static = StaticFloats(checkpoint, graph, floats)
                    else:
                        graph.static = self.integers(checkpoint, graph, bits)
                    report = on_layer if function is wanted[0] else lambda layer: None
                    model = graph.build(options.hidden_states, report)
                    (work / f"{function.name}.onnx").write_bytes(model.SerializeToString())
            describe(
                work,
                checkpoint,
                replace(checkpoint.config, context_length=shape.context_length),
                format=self.format,
                quantization=f"int4 block {BLOCK_SIZE}" if name == "int4" else name,
                check=compared if options.check else None,
            )
        return report_bundle(out)
