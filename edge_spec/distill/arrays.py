"""Arrays in files that run nothing when they are read: numpy's own for what is unfinished or kept,
safetensors for drafters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from edge_spec.storage.atomic import as_storage_error, atomic_file

_KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], note: object = None, mode: int = 0o644
) -> None:
    """note: what JSON can hold. Raises StorageError where there is no space, OSError."""
    stored: dict[str, Any] = {**arrays, "note": np.array(json.dumps(note))}
    with atomic_file(path, mode) as work, work.open("wb") as file:
        np.savez(file, **stored)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the arrays and the note. Raises ValueError for a file that is not whole, OSError."""
    try:
        with path.open("rb") as file, np.load(file) as stored:  # which refuses pickles
            arrays = dict(stored)
        return arrays, json.loads(str(arrays.pop("note")))
    except (AttributeError, BadZipFile, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from None


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises StorageError where there is no space, OSError."""
    header, end = {}, 0
    for name, each in tensors.items():
        begin, end = end, end + each.nbytes
        kind = _KINDS[each.dtype.name]
        header[name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for each in tensors.values():
            file.write(each.astype(each.dtype.newbyteorder("<")).tobytes())
