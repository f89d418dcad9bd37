"""Add parts of layers in onnxruntime's operators, with matrices as integer blocks or floats. Both
kinds write linear layers and embedding; the graph does not know about quantization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from onnx import TensorProto

from edge_spec.core.decoder_walk import DecoderWalk
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.block_quantize import (
    BlockQuantized,
    FittedLayers,
    in_turns,
    quantize_stored,
    turns_of,
)
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.nodes import CONTRIB, Initializers, Nodes
from edge_spec.exporters.requests import BLOCK_SIZE

EMBEDDING = "model.embed_tokens.weight"


class IntegerWeights:
    """Matrices for MatMulNBits with int8 activations.

    Embedding and head keep 8 bits at every setting, because low precision costs most there;
    llama.cpp's Q4_0 files keep 6 or 8.
    """

    def __init__(self, checkpoint: StoredCheckpoint, nodes: Nodes, bits: int) -> None:
        self._checkpoint = checkpoint
        self._nodes = nodes
        self._layers = FittedLayers(checkpoint, bits)
        self.bits = bits  # of layers
        self._tables: dict[str, list[str]] = {}  # stored parts, by table

    def linear(self, x: str, names: Sequence[str], biases: Sequence[str]) -> str:
        """Multiply x [..., in] by the concatenated matrices -> [..., sum of outs]."""
        return self._product(x, names, self._layers.take(names), biases)

    def rounded(self, x: str, names: Sequence[str]) -> str:
        """As `linear`, for matrices that are not fitted to their inputs. x: [rows, in]."""
        stored = [self._checkpoint.tensors[name] for name in names]
        return self._product(x, names, quantize_stored(stored, self.bits), [])

    def _product(
        self, x: str, names: Sequence[str], weight: BlockQuantized, biases: Sequence[str]
    ) -> str:
        bias = None
        if biases:
            bias = biases[0], np.concatenate([self._checkpoint.float32(name) for name in biases])
        return self._nodes.multiply_stored(x, names[0], weight, output_of(names[0]), bias)

    def embed(self, ids: str, output: str, name: str) -> str:
        """Look up rows of a table: ids [1, rows] -> `output` [1, rows, columns]."""
        if name == EMBEDDING:  # a tied head shares these blocks, in another shape
            inputs, shape = [*self._store_table(name)], [self._checkpoint.config.vocab_size, -1]
            inputs[0] = self._nodes.reshape(inputs[0], "embedding_shape", shape, "embedding_2d")
        else:  # only looked up: its blocks are side by side
            table = quantize_stored([self._checkpoint.tensors[name]], 8)
            inputs = self._nodes.store_parts(
                name, table.flat(), table.scales, table.stated_zero_points()
            )
        return self._nodes.add(
            "GatherBlockQuantized",
            [inputs[0], ids, *inputs[1:]],
            output,
            domain=CONTRIB,
            bits=8,
            block_size=BLOCK_SIZE,
            gather_axis=0,
            quantize_axis=1,
        )

    def head(self, hidden: str, name: str, output: str) -> None:
        """Compute the logits: hidden [rows, hidden] -> `output` [rows, vocab]."""
        config = self._checkpoint.config
        self._nodes.multiply_blocks(
            [hidden, *self._store_table(name)],
            (config.vocab_size, config.hidden_size),
            8,
            output,
        )

    def stacked(self, name: str, names: Sequence[Sequence[str]]) -> list[str]:
        """Store experts' matrices as `name`; return the names. names: per expert, those whose rows
        alternate."""
        tensors = self._checkpoint.tensors
        experts = [
            in_turns([quantize_stored([tensors[own]], self.bits) for own in each]) for each in names
        ]
        return self._nodes.store_experts(name, experts)

    def _store_table(self, name: str) -> list[str]:
        """Store embedding or head; a tied table only once."""
        if name not in self._tables:
            table = quantize_stored([self._checkpoint.tensors[name]], 8)
            self._tables[name] = self._nodes.store_blocks(name, table)
        return self._tables[name]


class FloatWeights:
    """Matrices stored as float16 or float32, and used as float32."""

    bits = None  # not in blocks

    def __init__(
        self, checkpoint: StoredCheckpoint, nodes: Nodes, stored: type[np.floating]
    ) -> None:
        self._checkpoint = checkpoint
        self._nodes = nodes
        self._stored = stored

    def linear(self, x: str, names: Sequence[str], biases: Sequence[str]) -> str:
        weight = self._add(names[0], lambda: np.concatenate([*map(self._read, names)]).T)
        output = output_of(names[0])
        if not biases:
            return self._nodes.add("MatMul", [x, weight], output)
        product = self._nodes.add("MatMul", [x, weight], output + ".product")
        joined = np.concatenate([self._checkpoint.float32(name) for name in biases])
        bias = self._nodes.weights.add(biases[0], joined)
        return self._nodes.add("Add", [product, bias], output)

    def rounded(self, x: str, names: Sequence[str]) -> str:
        return self.linear(x, names, [])

    def embed(self, ids: str, output: str, name: str) -> str:
        stored = output if self._stored is np.float32 else output + ".stored"
        return self.widen(self.look_up(ids, name, stored), output)

    def look_up(self, ids: str, name: str, output: str) -> str:
        table = self._nodes.weights.add_made(name, lambda: self._read(name))
        return self._nodes.add("Gather", [table, ids], output)

    def head(self, hidden: str, name: str, output: str) -> None:
        table = self._add(name, lambda: self._read(name))
        self._nodes.add("Gemm", [hidden, table], output, transB=1)

    def stacked(self, name: str, names: Sequence[Sequence[str]]) -> list[str]:
        experts = ([self._checkpoint.float32(own) for own in each] for each in names)
        stored = np.stack([turns_of(each).astype(self._stored) for each in experts])
        return [self.widen(self._nodes.weights.add(name, stored), name + ".float32")]

    def _read(self, name: str) -> np.ndarray:
        """Raises UnsupportedModelError for values beyond float16 if that is stored."""
        values = self._checkpoint.float32(name)
        if not np.abs(values).max() <= np.finfo(self._stored).max:
            raise UnsupportedModelError(
                f"{self._checkpoint.path}: {name} has values beyond float16",
                remedy="Export it with --quant fp32, or with --format gguf.",
            )
        return values.astype(self._stored)

    def _add(self, name: str, make: Callable[[], np.ndarray]) -> str:
        stored = self._nodes.weights.add_made(name, make)
        return self.widen(stored, name + ".float32")

    def widen(self, name: str, widened: str) -> str:
        if self._stored is np.float32:
            return name
        return self._nodes.add("Cast", [name], widened, to=TensorProto.FLOAT)


OnnxWeights = IntegerWeights | FloatWeights


def output_of(name: str) -> str:
    return name.removesuffix(".weight") + ".output"


class Emitter(Nodes, DecoderWalk[str]):
    """The nodes of a graph, or of a branch, that reads a checkpoint.

    Arguments and results are tensor names; the last argument mostly names the result. Constants and
    weights are stored once per name. matrices: how they are stored (`with_matrices`).
    """

    matrices: OnnxWeights

    def __init__(self, weights: Initializers, checkpoint: StoredCheckpoint) -> None:
        super().__init__(weights)
        self.checkpoint = checkpoint
        self.config = checkpoint.config

    def with_matrices(self, bits: int) -> Self:
        if bits <= 8:
            self.matrices = IntegerWeights(self.checkpoint, self, bits)
        else:
            kind = np.float16 if bits == 16 else np.float32
            self.matrices = FloatWeights(self.checkpoint, self, kind)
        return self

    def branch(self) -> Emitter:
        inner = Emitter(self.weights, self.checkpoint)
        inner.matrices = self.matrices
        return inner

    def vector(self, name: str) -> str:
        return self.weights.add_made(name, lambda: self.checkpoint.float32(name))

    def linear(self, x: str, prefix: str, parts: Sequence[str], has_bias: bool = False) -> str:
        biases = [f"{prefix}{part}.bias" for part in parts] if has_bias else []
        return self.matrices.linear(x, [f"{prefix}{part}.weight" for part in parts], biases)

    def norm(self, x: str, name: str, output: str = "") -> str:
        is_layer_norm = self.config.layer_norm
        return self.add(
            "LayerNormalization" if is_layer_norm else "SimplifiedLayerNormalization",
            [x, *self._norm_vectors(name)],
            output or name + ".output",
            axis=-1,
            epsilon=self.config.norm_epsilon,
        )

    def skip_norm(self, summands: list[str], name: str, outputs: list[str] | str) -> None:
        is_layer_norm = self.config.layer_norm
        self.add(
            "SkipLayerNormalization" if is_layer_norm else "SkipSimplifiedLayerNormalization",
            [*summands, *self._norm_vectors(name)],
            outputs,
            domain=CONTRIB,
            epsilon=self.config.norm_epsilon,
        )

    def _norm_vectors(self, name: str) -> list[str]:
        ends = ("weight", "bias") if self.config.layer_norm else ("weight",)
        return [self.vector(f"{name}.{end}") for end in ends]

    def plus(self, x: str, y: str, output: str) -> str:
        return self.add("Add", [x, y], output)

    def product(self, x: str, y: str, output: str) -> str:
        return self.add("Mul", [x, y], output)

    def times(self, x: str, scale: float, output: str) -> str:
        return x if scale == 1.0 else self.product(x, self._scalar(scale), output)

    def softcap(self, x: str, cap: float, output: str) -> str:
        small = self.add("Div", [x, self._scalar(cap)], output + ".small")
        bounded = self.add("Tanh", [small], output + ".tanh")
        return self.add("Mul", [bounded, self._scalar(cap)], output)

    def _scalar(self, value: float) -> str:
        return self.constant(f"scalar_{value!r}", value, np.float32)

    def activation(self, gate: str, prefix: str) -> str:
        name = self.config.activation
        if name == "relu":
            return self.add("Relu", [gate], prefix + "relu")
        if name == "gelu":
            return self.add("Gelu", [gate], prefix + "gelu")
        if name == "gelu_tanh":
            return self.add("FastGelu", [gate], prefix + "gelu", domain=CONTRIB)
        return self.add("QuickGelu", [gate], prefix + "swish", domain=CONTRIB, alpha=1.0)


def window_bias(graph: Emitter, window: int) -> str:
    """Return an `attention_bias` with a window of `window` tokens, the row's own included."""
    prefix = f"window.{window}."
    distance = distances(graph, prefix)
    limit = graph.constant(f"window_{window}", window, np.int32)
    near = graph.add("Less", [distance, limit], prefix + "near")
    never = graph.constant("never", -np.inf, np.float32)
    return graph.add("Where", [near, "attention_bias", never], prefix + "bias")


def distances(graph: Emitter, prefix: str) -> str:
    """Return [attended, total] int32: each row's position minus that of each token.

    Cached tokens are at their indices, the pass's rows after them at `position_ids`.
    """
    wide = graph.add("Squeeze", ["position_ids"], prefix + "wide")
    rows = graph.add("Cast", [wide], prefix + "rows", to=TensorProto.INT32)
    count = graph.add("Size", [rows], prefix + "count64")
    count = graph.add("Cast", [count], prefix + "count", to=TensorProto.INT32)
    past = graph.add("Sub", ["total_sequence_length", count], prefix + "past")
    cached = count_up(graph, past, prefix + "cached")
    positions = graph.add("Concat", [cached, rows], prefix + "positions", axis=0)
    last = graph.constant("last_axis", -1, np.int64)
    column = graph.add("Unsqueeze", [rows, last], prefix + "column")
    return graph.add("Sub", [column, positions], prefix + "distance")


def count_up(graph: Emitter, count: str, output: str) -> str:
    """Return 0 to count - 1, int32."""
    start = graph.constant("range_start", 0, np.int32)
    step = graph.constant("range_step", 1, np.int32)
    return graph.add("Range", [start, count, step], output)
