"""The weights that stay outside a binary, such as an embedding table, in one file for all
functions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper

DATA_FILE = "outside.data"
_LEAST_BYTES = 1024  # smaller ones stay in their graph


def share_outside(graphs: Iterable[Path]) -> None:
    """Moves the large initializers of these graphs, in one directory, into DATA_FILE beside them,
    those that are equal once."""
    stored: dict[bytes, tuple[int, int]] = {}
    for path in graphs:
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= _LEAST_BYTES:
                _move(tensor, path.parent / DATA_FILE, stored)
        path.write_bytes(model.SerializeToString())


def _move(tensor: TensorProto, data: Path, stored: dict[bytes, tuple[int, int]]) -> None:
    if tensor.raw_data not in stored:
        with data.open("ab") as file:
            stored[tensor.raw_data] = file.tell(), file.write(tensor.raw_data)
    offset, length = stored[tensor.raw_data]
    external_data_helper.set_external_data(tensor, data.name, offset, length)
    tensor.ClearField("raw_data")
