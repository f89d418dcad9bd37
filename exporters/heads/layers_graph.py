"""What graphs of layers of heads have in common: the formulas of Llama and Qwen3.

Experts are onnxruntime's operator, which reads those alone that rows take: no row's last bit
matters in a head, so rows are not kept apart as those of models are (exporters/onnx/experts.py).

Matrices are written as they are made: a message of protobuf ends at 2 GB, and a runtime maps a file
where it would hold copies of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Generic, TypeVar

import numpy as np
from onnx import TensorProto, ValueInfoProto

from edge_spec.core.heads import (
    FLOAT_BITS,
    WEIGHTS_FILE,
    DFlashHead,
    EagleHead,
    HeadExperts,
    HeadMatrix,
)
from edge_spec.exporters.block_quantize import BlockQuantized, quantize
from edge_spec.exporters.onnx.experts import add_moe
from edge_spec.exporters.onnx.nodes import (
    CONTRIB,
    Initializers,
    Nodes,
    tensor,
)

LIKELIEST = 4  # tokens of a row that are told: as many as a row of a tree has after it at most
_RESCORED = 16  # likeliest tokens of a row in 4 bits, among which the likeliest one in 8 bits is
_LARGEST_INT8 = 127


class HeadGraph(Nodes):
    """The nodes of a graph, or of a branch of one, that reads a head's matrices."""

    def branch(self) -> HeadGraph:
        """Nodes of their own, of a branch that reads the weights of this graph."""
        return HeadGraph(self.weights)

    def multiply(self, x: str, name: str, matrix: HeadMatrix, bits: int, output: str) -> str:
        """x: [..., in] -> [..., out], the bias added.

        bits: 4 or 8, or FLOAT_BITS for float32. The matrix is read a part at a time, without zero
        points: blocks of its weights lie around 0.
        """
        bias = None if matrix.bias is None else matrix.bias.astype(np.float32)
        if bits == FLOAT_BITS:
            return self._multiply_floats(x, name, matrix, bias, output)
        columns, rows = self._write_blocks(name, matrix, bits)
        inputs = [x, name, name + ".scales"]
        if bias is not None:  # after zero points and group index
            inputs += ["", "", self.weights.add(name + ".bias", bias)]
        return self.multiply_blocks(inputs, (rows, columns), (bits, BLOCK), output)

    def score(self, x: str, name: str, matrix: HeadMatrix, bits: int, output: str) -> str:
        """The same of a matrix that scores tokens, which low precision harms most. Where `bits` are
        4 it is read in 4 bits, half of what 8 would take, and the likeliest tokens are scored again
        by rows of 8 bits."""
        if bits != 4 or matrix.bias is not None:
            return self.multiply(x, name, matrix, max(bits, 8), output)
        scores = self.multiply(x, name, matrix, bits, output + ".rough")
        num_rows = sum(self._write_rows(name, matrix))
        kept = self.constant("rescored", [min(_RESCORED, num_rows)])
        rough, ids = output + ".rough.best", output + ".rough.ids"
        self.add("TopK", [scores, kept], [rough, ids], axis=-1)
        rows = self.add("Gather", [name + ".rows", ids], output + ".rows", axis=0)
        floats = self.add("Cast", [rows], output + ".floats", to=TensorProto.FLOAT)
        last = self.constant("last_axis", [-1])
        column = self.add("Unsqueeze", [x, last], output + ".column")
        products = self.add("MatMul", [floats, column], output + ".products")
        scales = self.add("Gather", [name + ".row_scales", ids], output + ".scales", axis=0)
        flat = self.add("Squeeze", [products, last], output + ".flat")
        exact = self.add("Mul", [flat, scales], output + ".exact")
        return self.add("ScatterElements", [scores, ids, exact], output, axis=-1)

    def _write_rows(self, name: str, matrix: HeadMatrix) -> list[int]:
        """Integers of 8 bits with a scale a row; returns how many rows each part has."""
        scales: list[np.ndarray] = []

        def rounded() -> Iterable[np.ndarray]:
            for read in matrix.parts:
                rows = read()
                scale = np.abs(rows).max(axis=1, keepdims=True) / _LARGEST_INT8
                scales.append(scale[:, 0].astype(np.float32))
                yield np.rint(rows / np.where(scale, scale, 1)).astype(np.int8)

        self.weights.add_parts(name + ".rows", rounded())
        self.weights.add_parts(name + ".row_scales", [np.concatenate(scales)])
        return [len(each) for each in scales]

    def _write_blocks(self, name: str, matrix: HeadMatrix, bits: int) -> tuple[int, int]:
        """Returns how many columns and rows the matrix has."""
        columns, scales = 0, []

        def packed() -> Iterable[np.ndarray]:
            nonlocal columns
            for read in matrix.parts:
                stored = quantize(read(), bits, BLOCK, symmetric=True)
                columns = stored.columns
                scales.append(stored.scales)
                yield stored.packed

        self.weights.add_parts(name, packed())
        joined = np.concatenate(scales)
        self.weights.add_parts(name + ".scales", [joined])
        return columns, len(joined)

    def _multiply_floats(
        self, x: str, name: str, matrix: HeadMatrix, bias: np.ndarray | None, output: str
    ) -> str:
        whole = np.concatenate([read() for read in matrix.parts]).T
        inputs = [x, self.weights.add(name, whole)]
        if bias is None:
            return self.add("MatMul", inputs, output)
        product = self.add("MatMul", inputs, output + ".product")
        return self.add("Add", [product, self.weights.add(name + ".bias", bias)], output)

    def silu(self, x: str, output: str) -> str:
        return self.add("Mul", [x, self.add("Sigmoid", [x], x + ".sigmoid")], output)

    def tell_likeliest(
        self, logits: str, tokens: int, count: int = LIKELIEST
    ) -> list[ValueInfoProto]:
        """Adds `likeliest` and `shares` of `logits` [rows, tokens], and returns all three as
        outputs of the graph: tokens in falling order, and their shares of the sum of e to the
        logits."""
        probs = self.add("Softmax", [logits], "probs", axis=-1)
        kept = self.constant("kept", [min(count, tokens)])
        self.add("TopK", [probs, kept], ["shares", "likeliest"], axis=-1)
        return [
            tensor(logits, TensorProto.FLOAT, ["scored", "tokens"]),
            tensor("likeliest", TensorProto.INT64, ["scored", "count"]),
            tensor("shares", TensorProto.FLOAT, ["scored", "count"]),
        ]


BLOCK = 32  # weights that share a scale


def add_mixture(
    graph: HeadGraph,
    matrices: Mapping[str, HeadMatrix],
    experts: HeadExperts,
    bits: int,
    x: str,
    prefix: str,
) -> str:
    """x: [1, rows, hidden], what router and experts read -> the same, what they add. matrices,
    bits: as `HeadGraph.multiply` has them; prefix: of the names of the layer's matrices."""
    router = np.concatenate([read() for read in matrices[prefix + "router"].parts])
    hidden = router.shape[1]
    rows = graph.reshape(x, "expert_rows_shape", [-1, hidden], prefix + "rows")
    stored = graph.weights.add(prefix + "router", router)
    scores = graph.add("Gemm", [rows, stored], prefix + "scores", transB=1)
    up, down = (
        _stacked(
            graph,
            prefix + name,
            [matrices[f"{prefix}experts.{n}.{name}"] for n in range(experts.count)],
            bits,
        )
        for name in ("gate_up", "down")
    )
    attributes: dict[str, float] = {"activation_alpha": 1.0, "activation_beta": 0.0}
    if bits == FLOAT_BITS:
        attributes["normalize_routing_weights"] = 1
    blocks = None if bits == FLOAT_BITS else (bits, BLOCK)
    output, used = prefix + "mixed_rows", experts.used
    mixed = add_moe(
        graph, [rows, scores], ([*up, ""], [*down, ""]), output, blocks, k=used, **attributes
    )
    return graph.reshape(mixed, "pass_shape", [1, -1, hidden], prefix + "mixture")


def _stacked(graph: HeadGraph, name: str, matrices: Sequence[HeadMatrix], bits: int) -> list[str]:
    """Writes the matrices of all experts: one name of floats, else those of packed values, scales
    and zero points. The rows of gate and up take turns, as the operator reads them."""
    name += ".experts"
    if bits == FLOAT_BITS:
        graph.weights.add_parts(name, (_in_turns(each)[None] for each in matrices))
        return [name]
    made: list[BlockQuantized] = []

    def packed() -> Iterator[np.ndarray]:
        for each in matrices:
            stored = quantize(_in_turns(each), bits, BLOCK, symmetric=True)
            made.append(stored)
            yield stored.packed.reshape(1, len(stored.packed), -1)

    graph.weights.add_parts(name, packed())
    graph.weights.add_parts(name + ".scales", [np.stack([each.scales for each in made])])
    zeros = np.stack([each.stated_zero_points() for each in made])
    graph.weights.add_parts(name + ".zero_points", [zeros])
    return [name, name + ".scales", name + ".zero_points"]


def _in_turns(matrix: HeadMatrix) -> np.ndarray:
    """The parts of a matrix, of as many rows each: a row of each, then the next ones."""
    parts = [read() for read in matrix.parts]
    turns: np.ndarray = np.stack(parts, axis=1).reshape(-1, parts[0].shape[-1])
    return turns


_Head = TypeVar("_Head", EagleHead, DFlashHead)


class LayersGraph(Generic[_Head]):
    """Writes what graphs of layers of heads have in common: the formulas of Llama and Qwen3.

    matrices: all of the head's; bits: of layers, as `HeadGraph.multiply` has them, and of output
    matrices as `HeadGraph.score` does.
    """

    def __init__(
        self,
        head: _Head,
        matrices: Mapping[str, HeadMatrix],
        bits: int,
        weights: BinaryIO,
    ) -> None:
        self._head: _Head = head
        self._config, self._tensors = head.config, head.tensors
        self._experts = head.experts if isinstance(head, EagleHead) else None
        self._matrices, self._bits = matrices, bits
        self._graph = HeadGraph(Initializers(weights, WEIGHTS_FILE))
        self._norms = {name: head.tensors[name] for name in head.tensors if "norm" in name}

    def _turned(self, x: str, heads: int, positions: str) -> str:
        """x: [1, rows, heads * head_dim] of queries or keys, normed where there is such a norm."""
        config = self._config
        partial = {"rotary_embedding_dim": config.rotary_dim} if config.rotary_dim else {}
        return self._graph.add(
            "RotaryEmbedding",
            [self._norm_each(x), positions, "cos", "sin"],
            x + ".turned",
            domain=CONTRIB,
            num_heads=heads,
            **partial,
        )

    def _leave(self, stream: str, mixed: str, layer: int) -> str:
        graph, prefix = self._graph, f"layers.{layer}."
        attended = self._multiply(mixed, prefix + "o")
        stream = graph.add("Add", [stream, attended], prefix + "attended")
        read = self._norm(stream, prefix + "post_norm")
        joined = self._multiply(read, prefix + "gate_up")
        halves = [prefix + "gate", prefix + "up"]
        graph.add("Split", [joined], halves, axis=-1, num_outputs=2)
        gated = graph.silu(halves[0], prefix + "activated")
        product = graph.add("Mul", [gated, halves[1]], prefix + "product")
        update = self._multiply(product, prefix + "down")
        if self._experts is not None:
            shared = graph.add(
                "Sigmoid", [self._multiply(read, prefix + "shared_gate")], prefix + "shared"
            )
            own = graph.add("Mul", [update, shared], prefix + "own")
            mixed = add_mixture(graph, self._matrices, self._experts, self._bits, read, prefix)
            update = graph.add("Add", [own, mixed], prefix + "both")
        return graph.add("Add", [stream, update], prefix + "stream")

    def _multiply(self, x: str, name: str, output: str = "") -> str:
        matrix = self._matrices[name]
        multiply = self._graph.score if matrix.is_output else self._graph.multiply
        return multiply(x, name, matrix, self._bits, output or name + ".output")

    def _norm(self, x: str, name: str) -> str:
        """Root mean square normalization, where the head has such a norm."""
        weight = self._norms.get(name)
        if weight is None:
            return x
        return self._graph.add(
            "SimplifiedLayerNormalization",
            [x, self._graph.weights.add(name, weight.astype(np.float32))],
            f"{name}.output",
            axis=-1,
            epsilon=self._config.norm_epsilon,
        )

    def _norm_each(self, x: str) -> str:
        """The norm of each head of queries or keys, where there is one."""
        if f"{x}_norm" not in self._norms:
            return x
        graph, size = self._graph, self._config.head_dim
        split = graph.reshape(x, "head_shape", [1, 0, -1, size], x + ".heads")
        normed = self._norm(split, f"{x}_norm")
        return graph.reshape(normed, "flat_shape", [1, 0, -1], x + ".flat")

    def _tables(self) -> list[ValueInfoProto]:
        """The inputs of rotary tables."""
        half = self._config.rotated // 2
        return [tensor(name, TensorProto.FLOAT, ["positions", half]) for name in ("cos", "sin")]

    def _keys_values(self, when: str, slots: str) -> list[ValueInfoProto]:
        """Returns keys and values of all layers; when: what their names begin with."""
        shape: list[int | str] = [1, self._config.num_kv_heads, slots, self._config.head_dim]
        return [
            tensor(f"{when}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(self._config.num_layers)
            for part in ("key", "value")
        ]
