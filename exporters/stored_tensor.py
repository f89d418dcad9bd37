"""A weight in the form in which its file stores it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from edge_spec.errors import UnsupportedModelError

_SLICE_WEIGHTS = 1 << 22  # that one thread dequantizes at once
_Part = TypeVar("_Part")
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A weight still in its file; `row_order` rearranges the stored rows into Hugging Face's, and
    `read_rows` makes them of a file that has no rows: it returns uint8 [rows, row_bytes]."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray  # uint8 [..., row_bytes], a view of the mapped file
    row_order: np.ndarray | None = None
    read_rows: Callable[[slice | np.ndarray], np.ndarray] | None = None

    def stored_rows(self) -> np.ndarray:
        """uint8 [..., row_bytes] in Hugging Face's row order."""
        if self.read_rows is not None:
            return self.read_rows(slice(None))
        if self.row_order is None:
            return self.data
        rows = self.data.reshape(self.shape[0], -1)  # a bias has one item a row
        ordered: np.ndarray = rows[self.row_order]
        return ordered

    def rows(self, rows: slice | np.ndarray) -> StoredTensor:
        """Returns some rows of a matrix, by their indices; a slice of stored rows is a view."""
        if self.read_rows is not None:
            data = self.read_rows(rows)
            return StoredTensor((len(data), *self.shape[1:]), self.kind, data)
        stored = rows if self.row_order is None else self.row_order[rows]
        data = self.data[stored]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data, row_order=None)

    def float32(self) -> np.ndarray:
        """The values, in `shape`. Raises UnsupportedModelError for a type gguf cannot read."""
        step = max(1, _SLICE_WEIGHTS // self.shape[-1])
        if len(self.shape) != 2 or self.shape[0] <= step:
            return self._float32()
        values = np.empty(self.shape, np.float32)

        def fill(rows: slice) -> None:
            values[rows] = self.rows(rows)._float32()

        on_all_cores(fill, [slice(i, i + step) for i in range(0, self.shape[0], step)])
        return values

    @property
    def file_map(self) -> mmap.mmap | None:
        """Returns the file that `data` is a view of; None for values that were made."""
        base: Any = self.data
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        return base if isinstance(base, mmap.mmap) else None

    def _float32(self) -> np.ndarray:
        try:
            values = quants.dequantize(self.stored_rows(), self.kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"weights of type {self.kind.name} cannot be dequantized",
                remedy="Use a file in F16, Q8_0, Q4_0, Q4_1, Q5_x or a K-quant.",
            ) from None
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)


def on_all_cores(work: Callable[[_Part], _Made], parts: Sequence[_Part]) -> list[_Made]:
    """Returns what `work` makes of each part, in their order; numpy lets threads run at once."""
    if len(parts) == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, parts))
