"""Store matrices in a Core ML program as float16, integer blocks or palettes.

All functions of a package add the same constants; those of one name are stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd, log2
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as ops  # noqa: N813
from coremltools.converters.mil.mil import types

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.block_quantize import quantize_stored
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.stored_tensor import StoredTensor

MAX_TABLE_BITS = 0.25  # per weight
_ROUNDS = 15  # of Lloyd's algorithm


@dataclass(frozen=True, eq=False)
class Palettized:
    """A weight matrix [rows, columns]; rows / groups neighbouring rows share each table."""

    indices: np.ndarray  # uint8 [rows, columns], below 2 ** bits
    tables: np.ndarray  # float16 [groups, 2 ** bits], ascending


def palettize(weights: np.ndarray, bits: int, importance: np.ndarray | None = None) -> Palettized:
    """Return a nearly optimal table per group: weighted 1-D k-means (Lloyd 1982; weights by
    sensitivity: Kim et al. 2024, SqueezeLLM).

    importance: [columns], the weight of an error, such as the input's mean square. Groups divide
    the rows, and are as small as tables of 1/4 bit per weight allow.
    """
    rows, columns = weights.shape
    group = gcd(_group_rows(columns, bits), rows)
    flat = weights.reshape(rows // group, -1)
    counts = np.ones(columns) if importance is None else importance / importance.mean()
    counts = np.tile(counts, group)
    indices = np.empty(flat.shape, np.uint8)
    tables = np.empty((len(flat), 1 << bits), np.float16)
    for row, values in enumerate(flat):
        tables[row] = table = _cluster(values, counts, 1 << bits).astype(np.float16)
        indices[row] = np.searchsorted(_borders(table), values)
    return Palettized(indices.reshape(weights.shape), tables)


def _group_rows(columns: int, bits: int) -> int:
    """Return the least power of two of rows whose float16 table stays within MAX_TABLE_BITS."""
    needed = (16 << bits) / (columns * MAX_TABLE_BITS)
    return 1 << max(ceil(log2(needed)), 0)


def _cluster(values: np.ndarray, counts: np.ndarray, num_centres: int) -> np.ndarray:
    """Return ascending centres, float64 [num_centres]. counts: weights of the values."""
    order = np.argsort(values)
    ordered, counts = values[order].astype(np.float64), counts[order]
    mass = np.concatenate([[0.0], np.cumsum(counts)])
    sums = np.concatenate([[0.0], np.cumsum(counts * ordered)])
    # Quantiles give the tails, where large weights are, few centres; mix with an even grid.
    wanted = (np.arange(num_centres) + 0.5) / num_centres * mass[-1]
    centres: np.ndarray = np.interp(wanted, mass[1:], ordered)
    centres = (centres + np.linspace(ordered[0], ordered[-1], num_centres)) / 2
    for _ in range(_ROUNDS):
        inner = np.searchsorted(ordered, _borders(centres), side="right")
        ends = np.concatenate([[0], inner, [len(ordered)]])
        within = np.diff(mass[ends])
        centres = np.where(within > 0, np.diff(sums[ends]) / np.maximum(within, 1e-30), centres)
        centres.sort()
    return centres


def _borders(centres: np.ndarray) -> np.ndarray:
    """Return midpoints of neighbours; a value at one belongs to the lower."""
    middle: np.ndarray = (centres[1:].astype(np.float32) + centres[:-1].astype(np.float32)) / 2
    return middle


Var = Any  # coremltools' Var
_INTEGERS = {4: types.np_int4_dtype, 8: np.int8}
_INDICES = {4: types.np_uint4_dtype, 6: types.np_uint6_dtype}


# Add a matrix [rows, columns] to the current function, with a name and shape (rows, columns, 1,
# ...).
Stored = Callable[[str, tuple[int, ...]], Var]
Storage = Callable[[StoredTensor], Stored]


def dense(dtype: type[np.floating]) -> Storage:
    def store(tensor: StoredTensor) -> Stored:
        values = tensor.float32().astype(dtype)
        return lambda name, shape: constant(name, values.reshape(shape))

    return store


def blocks(bits: int) -> Storage:
    """Store symmetric blocks, which Core ML's GPU kernels require. GGUF's Q4_0 and Q8_0 are kept
    bit for bit."""

    def store(tensor: StoredTensor) -> Stored:
        found = quantize_stored([tensor], bits, symmetric=True)
        middle = 1 << (found.bits - 1)
        levels = (found.levels().astype(np.int16) - middle).astype(_INTEGERS[found.bits])
        scales = found.scales.astype(np.float16)

        def add(name: str, shape: tuple[int, ...]) -> Var:
            return ops.constexpr_blockwise_shift_scale(
                data=constant(name + "_levels", levels.reshape(shape)),
                scale=constant(name + "_scales", scales.reshape(*scales.shape, *shape[2:])),
                name=name,
            )

        return add

    return store


def palette(bits: int) -> Storage:
    def store(tensor: StoredTensor) -> Stored:
        found = palettize(tensor.float32(), bits, tensor.importance)
        indices = found.indices.astype(_INDICES[bits])
        groups, entries = found.tables.shape

        def add(name: str, shape: tuple[int, ...]) -> Var:
            table = found.tables.reshape(groups, *(1 for _ in shape[1:]), entries, 1)
            return ops.constexpr_lut_to_dense(
                indices=constant(name + "_indices", indices.reshape(shape)),
                lut=constant(name + "_table", table),
                name=name,
            )

        return add

    return store


def constant(name: str, values: np.ndarray, stored_as: str | None = None) -> Var:
    """Add a constant. A name, or `stored_as`, must stand for the same values everywhere."""
    var = ops.const(val=values, name=name)
    var.op.weight_id = stored_as or name
    return var


class CoreMlWeights:
    """Read each tensor of a checkpoint once. head: storage of embedding and head."""

    def __init__(
        self,
        checkpoint: StoredCheckpoint,
        body: Storage,
        head: Storage,
        dtype: type[np.floating],
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._body = body
        self._head = head
        self._stored: dict[str, Stored] = {}

    def vector(self, name: str) -> Var:
        shape = self.checkpoint.tensors[name].shape
        return self._add(name, dense(self.dtype), slice(0, shape[0]), shape)

    def zeros(self, name: str, size: int) -> Var:
        """Return a zero bias; coremltools would otherwise store one per layer."""
        return constant(_identifier(name + ".zeros"), np.zeros(size, self.dtype), f"zeros_{size}")

    def matrix(self, name: str, num_trailing: int = 0) -> Var:
        """Return [out, in, 1, ...] with `num_trailing` ones."""
        rows, columns = self.checkpoint.tensors[name].shape
        shape = (rows, columns, *(1,) * num_trailing)
        return self._add(name, self._body, slice(0, rows), shape)

    def head(self, name: str, rows: slice, num_trailing: int = 0) -> Var:
        columns = self.checkpoint.tensors[name].shape[1]
        shape = (rows.stop - rows.start, columns, *(1,) * num_trailing)
        return self._add(name, self._head, rows, shape)

    def _add(self, name: str, storage: Storage, rows: slice, shape: tuple[int, ...]) -> Var:
        tensor = self.checkpoint.tensors[name]
        key = _identifier(f"{name}.{rows.start}")
        if key not in self._stored:
            self._require_fitting(name, tensor)
            self._stored[key] = storage(tensor.rows(rows))
        return self._stored[key](key, shape)

    def _require_fitting(self, name: str, tensor: StoredTensor) -> None:
        if not np.abs(tensor.float32()).max() <= np.finfo(self.dtype).max:
            raise UnsupportedModelError(
                f"{self.checkpoint.path}: {name} has values beyond float16, which Core ML "
                "computes in",
                remedy="Export it with --format gguf or onnx.",
            )


def _identifier(name: str) -> str:
    return name.replace(".", "_")
