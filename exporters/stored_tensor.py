"""A weight as its file stores it, and a bounded, memory-mapped reader of safetensors files.

The `safetensors` package cannot return bfloat16 to numpy; this returns the stored bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.models.bundle import regular_size


def damaged(problem: str) -> ModelFileError:
    return ModelFileError(problem, remedy="Download or convert it again.")


_SLICE_WEIGHTS = 1 << 22  # dequantized by one thread at once
_Part = TypeVar("_Part")
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A weight in its file. read_rows: replaces reading `data`, returns uint8 [rows, row_bytes].
    importance: [columns], the cost of an error in each; None: equal."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray  # uint8 [..., row_bytes], a view of the mapped file
    read_rows: Callable[[slice | np.ndarray], np.ndarray] | None = None
    importance: np.ndarray | None = None

    @classmethod
    def of(cls, values: np.ndarray) -> StoredTensor:
        """Return a float32 tensor of values that are in no file."""
        stored = np.ascontiguousarray(values, np.float32).view(np.uint8)
        return cls(values.shape, GGMLQuantizationType.F32, stored)

    def stored_rows(self) -> np.ndarray:
        """Return uint8 [..., row_bytes] in Hugging Face's row order."""
        return self.data if self.read_rows is None else self.read_rows(slice(None))

    def rows(self, rows: slice | np.ndarray) -> StoredTensor:
        """Return some rows; a slice of stored rows is a view."""
        if self.read_rows is not None:
            return self.in_order(np.arange(self.shape[0])[rows])
        data = self._by_row()[rows]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data)

    def in_order(self, rows: np.ndarray) -> StoredTensor:
        """Return the rows in this order, without reading them."""
        read = self._by_row().__getitem__ if self.read_rows is None else self.read_rows
        shape = (len(rows), *self.shape[1:])
        return replace(self, shape=shape, read_rows=lambda chosen: read(rows[chosen]))

    def _by_row(self) -> np.ndarray:
        return self.data if len(self.shape) > 1 else self.data.reshape(self.shape[0], -1)

    def float32(self) -> np.ndarray:
        """Return the values in `shape`. Raises UnsupportedModelError for a type that gguf cannot
        read."""
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
        """Return the mapped file of `data`; None for values in memory."""
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
    """Run `work` on all parts in threads (numpy releases the GIL), in order."""
    if len(parts) == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, parts))


# The format allows 100 MB, which Python parses into 2 GB; large models have 1 MB.
MAX_HEADER_BYTES = 32_000_000
MAX_DIMS = 8  # models have 2, image filters 5
_SHOWN = 200  # characters of a name in messages
KINDS = {  # and bytes per item
    "F32": (GGMLQuantizationType.F32, 4),
    "F16": (GGMLQuantizationType.F16, 2),
    "BF16": (GGMLQuantizationType.BF16, 2),
    "U8": (GGMLQuantizationType.I8, 1),  # a family's own packing
    # In trained heads.
    "I64": (GGMLQuantizationType.I64, 8),
    "BOOL": (GGMLQuantizationType.I8, 1),
}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors, still on disk. Raises ModelFileError, UnsupportedModelError."""
    try:
        regular_size(path)  # opening a pipe would block
        mapped = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot read {path}: {error}", remedy="Expected a safetensors file."
        ) from None
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little")
    if len(mapped) < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise _damaged(path, f"a header of {header_bytes} bytes in a file of {len(mapped)}")
    try:
        header = json.loads(mapped[8 : 8 + header_bytes].tobytes())
    except (ValueError, RecursionError):
        raise _damaged(path, "the header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    body = mapped[8 + header_bytes :]
    tensors = {
        name: _tensor(path, name, entry, body)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    described = sum(tensor.data.nbytes for tensor in tensors.values())
    if described != len(body):
        raise _damaged(path, f"tensors of {described} bytes in {len(body)} bytes of data")
    return tensors


def _tensor(path: Path, name: str, entry: Any, body: np.ndarray) -> StoredTensor:
    try:
        dtype = str(entry["dtype"])
        num_dims = len(entry["shape"])
        shape = tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, OverflowError, TypeError, ValueError):
        raise _damaged(path, f"no type, shape and offsets for tensor {name[:_SHOWN]}") from None
    if dtype not in KINDS:
        raise UnsupportedModelError(
            f"tensor {name[:_SHOWN]} in {path} has the type {dtype[:_SHOWN]}",
            remedy="Save the model in F32, F16 or BF16.",
        )
    kind, item_bytes = KINDS[dtype]
    # Check dimensions first: multiplying numbers of thousands of digits takes long.
    fits = (
        1 <= num_dims <= MAX_DIMS
        and all(1 <= dim <= len(body) for dim in shape)
        and 0 <= begin <= end <= len(body)
        and end - begin == math.prod(shape) * item_bytes
    )
    if not fits:
        what = f"tensor {name[:_SHOWN]} of shape {reprlib.repr(shape)}"
        raise _damaged(path, f"{what} at {reprlib.repr(begin)}..{reprlib.repr(end)}")
    data = body[begin:end].reshape(*shape[:-1], shape[-1] * item_bytes)
    return StoredTensor(shape, kind, data)


def _damaged(path: Path, what: str) -> ModelFileError:
    return damaged(f"{path} is damaged: {what}")
