"""Arrays in the format safetensors, which says what there is and runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_spec.storage.atomic import as_storage_error

_KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_NOTE = "note"
_START_BYTES = 8  # the length of the header


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], note: str = "") -> None:
    """note: kept among the metadata. Raises StorageError where there is no space, OSError."""
    header: dict[str, object] = {"__metadata__": {_NOTE: note}} if note else {}
    at = 0
    for name, values in tensors.items():
        ends = [at, at + values.nbytes]
        kind = _KINDS[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": ends}
        at += values.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(told).to_bytes(_START_BYTES, "little") + told)
        for values in tensors.values():
            file.write(values.astype(values.dtype.newbyteorder("<")).tobytes())


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """The arrays and the note of a file that `write_tensors` wrote. Raises ValueError for any that
    is not whole, OSError."""
    stored = path.read_bytes()
    begin = _START_BYTES + int.from_bytes(stored[:_START_BYTES], "little")
    header = json.loads(stored[_START_BYTES:begin])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    tensors: dict[str, np.ndarray] = {}
    try:
        note = str(header.pop("__metadata__", {}).get(_NOTE, ""))
        for name, told in header.items():
            kind, count = np.dtype(_NAMES[told["dtype"]]), math.prod(told["shape"])
            values = np.frombuffer(stored, kind, count, begin + told["data_offsets"][0])
            tensors[name] = values.reshape(told["shape"]).copy()
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from None
    return tensors, note
