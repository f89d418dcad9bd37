"""Arrays in the format safetensors, which says what there is and runs nothing."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge_spec.storage.atomic import as_storage_error

_KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_NOTE = "note"
_START_BYTES = 8  # the length of the header
_Training = TypeVar("_Training")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Raw:
    """A tensor as the format stores it. kind: the format's name of what its numbers are."""

    kind: str
    shape: Sequence[int]
    num_bytes: int
    read: Callable[[], bytes]  # little-endian


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], note: str = "") -> None:
    """note: kept among the metadata. Raises StorageError where there is no space, OSError."""
    write_raw(path, {name: _raw(values) for name, values in tensors.items()}, note)


def write_raw(path: Path, tensors: Mapping[str, Raw], note: str = "") -> None:
    """Reads and writes one after the other. Raises as `write_tensors` does."""
    header: dict[str, object] = {"__metadata__": {_NOTE: note}} if note else {}
    at = 0
    for name, each in tensors.items():
        ends = [at, at + each.num_bytes]
        header[name] = {"dtype": each.kind, "shape": list(each.shape), "data_offsets": ends}
        at += each.num_bytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(told).to_bytes(_START_BYTES, "little") + told)
        for each in tensors.values():
            file.write(each.read())


def _raw(values: np.ndarray) -> Raw:
    def read() -> bytes:
        return values.astype(values.dtype.newbyteorder("<")).tobytes()

    return Raw(_KINDS[values.dtype.name], values.shape, values.nbytes, read)


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


def read_unfinished(
    path: Path, build: Callable[[dict[str, np.ndarray], Any], _Training]
) -> _Training | None:
    """Returns what `build` makes of the arrays and of the note, which is JSON, of an unfinished
    training; None where there is none, or one that is damaged, which a warning says. build: raises
    KeyError, TypeError, ValueError."""
    try:
        arrays, note = read_tensors(path)
        return build(arrays, json.loads(note))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("training begins again: %s is damaged (%s)", path, error)
        return None


def group_of(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns the arrays "name/...", without that."""
    prefix = name + "/"
    return {
        key.removeprefix(prefix): each for key, each in arrays.items() if key.startswith(prefix)
    }
