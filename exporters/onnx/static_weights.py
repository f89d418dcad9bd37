"""Stores the matrices of a static graph, in standard operators alone.

NPU compilers read integers as DequantizeLinear: with a scale a block of 4-bit weights, and a scale
an output channel of 8-bit ones (ONNX opset 21). Every function of a bundle adds the same tensors;
those of one name lie once in the weights file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from onnx import TensorProto

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters import block_quantize
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.initializers import Initializers
from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.weights import EMBEDDING
from edge_spec.exporters.static_layout import BLOCK_SIZE

_LARGEST = 127  # of symmetric 8-bit levels


class StaticWeights(Protocol):
    """Reads matrices from a checkpoint and adds them to a function's nodes."""

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        """x times the transposed matrix; x: [..., in] -> [..., out]."""

    def embed(self, nodes: Nodes, ids: str) -> str:
        """ids: [1, rows] -> [1, rows, hidden] float32."""

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        """hidden: [rows, hidden] -> `output`, the logits [rows, vocab]."""


class StaticFloats:
    """Stores matrices as float16 or float32, and multiplies with them as float32."""

    def __init__(
        self, checkpoint: StoredCheckpoint, weights: Initializers, stored: type[np.floating]
    ) -> None:
        self._checkpoint = checkpoint
        self._weights = weights
        self._stored = stored

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        stored = self._weights.add_made(name, lambda: self._read(name).T)
        return nodes.add("MatMul", [x, self._widen(nodes, stored)], _output(name))

    def embed(self, nodes: Nodes, ids: str) -> str:
        table = self._weights.add_made(EMBEDDING, lambda: self._read(EMBEDDING))
        return self._widen(nodes, nodes.add("Gather", [table, ids], "embedded"))

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        table = self._weights.add_made(name, lambda: self._read(name))
        nodes.add("Gemm", [hidden, self._widen(nodes, table)], output, transB=1)

    def _read(self, name: str) -> np.ndarray:
        """Raises UnsupportedModelError for values beyond float16, where that is what is stored."""
        values = self._checkpoint.float32(name)
        if not np.abs(values).max() <= np.finfo(self._stored).max:
            raise UnsupportedModelError(
                f"{self._checkpoint.path}: {name} has values beyond float16",
                remedy="Export it with --quant fp32, or with --format onnx or gguf.",
            )
        return values.astype(self._stored)

    def _widen(self, nodes: Nodes, name: str) -> str:
        if self._stored is np.float32:
            return name
        return nodes.add("Cast", [name], name + ".float32", to=TensorProto.FLOAT)


class StaticIntegers:
    """Stores the layers' matrices as 8-bit channels or symmetric 4-bit blocks; embedding and head,
    where few bits cost most, as 8-bit channels."""

    def __init__(
        self,
        checkpoint: StoredCheckpoint,
        weights: Initializers,
        bits: int,
        importance: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self._checkpoint = checkpoint
        self._weights = weights
        self._bits = bits
        self._importance = importance  # of columns, by the matrix's name

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        widened = self._blocks(nodes, name) if self._bits == 4 else self._channels(nodes, name)
        return nodes.add("MatMul", [x, widened], _output(name))

    def embed(self, nodes: Nodes, ids: str) -> str:
        levels, scales = self._table(EMBEDDING)
        column = self._weights.add("column_shape", np.array([1, -1, 1]))
        picked = nodes.add("Gather", [levels, ids], "embedded.levels")
        floats = nodes.add("Cast", [picked], "embedded.floats", to=TensorProto.FLOAT)
        scale = nodes.add("Gather", [scales, ids], "embedded.scales")
        scale = nodes.add("Reshape", [scale, column], "embedded.column")
        return nodes.add("Mul", [floats, scale], "embedded")

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        table = [*self._table(name)]
        widened = nodes.add("DequantizeLinear", table, name + ".float32", axis=0)
        nodes.add("Gemm", [hidden, widened], output, transB=1)

    def _channels(self, nodes: Nodes, name: str) -> str:
        made: list[tuple[np.ndarray, np.ndarray]] = []

        def part(which: int) -> np.ndarray:
            if not made:  # once, and not at all where it is kept
                made.append(channels(self._checkpoint.float32(name)))
            return made[0][which].T

        add = self._weights.add_made
        inputs = [add(name, lambda: part(0)), add(name + ".scales", lambda: part(1))]
        return nodes.add("DequantizeLinear", inputs, name + ".float32", axis=1)

    def _blocks(self, nodes: Nodes, name: str) -> str:
        made: list[block_quantize.BlockQuantized] = []

        def found() -> block_quantize.BlockQuantized:
            if not made:
                tensor = self._checkpoint.tensors[name]
                carried = block_quantize.carried([tensor], 4, BLOCK_SIZE)
                importance = self._importance.get(name)
                made.append(
                    carried
                    or block_quantize.quantize(tensor.float32(), 4, BLOCK_SIZE, True, importance)
                )
            return made[0]

        stored = self._weights.add_int4(name, lambda: found().levels().T.astype(np.int8) - 8)
        scales = self._weights.add_made(name + ".scales", lambda: found().scales.T)
        return nodes.add(
            "DequantizeLinear",
            [stored, scales],
            name + ".float32",
            axis=0,
            block_size=BLOCK_SIZE,
        )

    def _table(self, name: str) -> tuple[str, str]:
        """Levels [vocab, hidden] and scales [vocab] of embedding or head, which may be one."""
        made: list[tuple[np.ndarray, np.ndarray]] = []

        def part(which: int) -> np.ndarray:
            if not made:
                made.append(channels(self._checkpoint.float32(name)))
            return made[0][which]

        add = self._weights.add_made
        return add(name, lambda: part(0)), add(name + ".scales", lambda: part(1))


def channels(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns levels int8 [out, in] and scales float32 [out], symmetric."""
    largest = np.abs(weights).max(axis=1)
    scales = np.where(largest > 0, largest / np.float32(_LARGEST), np.float32(1))
    return np.rint(weights / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def _output(name: str) -> str:
    return name.removesuffix(".weight") + ".output"
