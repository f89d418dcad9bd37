"""Reads what the files of a static ONNX bundle say of themselves, before anything runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.static.layout import EXPORT_AGAIN, Layout, Signature, read_layout
from edge_spec.runtimes.static.onnx_program import GraphSignature, Value, layout_signature

FORMAT = "onnx-static"
DATA_FILE = "model.onnx.data"  # the weights of all functions
_ENDING = ".onnx"
_DTYPES: Mapping[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.INT32: np.dtype(np.int32),
}


@dataclass(frozen=True)
class OpenedGraphs:
    """The graphs of a bundle, by their functions' names."""

    files: Mapping[str, str]  # names in the bundle
    signatures: Mapping[str, GraphSignature]
    layout: Layout

    @classmethod
    def of(cls, bundle: Bundle, format: str = FORMAT) -> OpenedGraphs:
        """Raises UsageError for a bundle of another format, BundleError for one whose graphs are
        not those of its manifest."""
        if bundle.manifest.format != format:
            raise UsageError(
                f"{bundle.path} is a bundle of format {bundle.manifest.format}, not {format}",
                remedy=f"Export the model with --format {format}.",
            )
        names = [name for name in bundle.manifest.files if name.endswith(_ENDING)]
        files = {name.removesuffix(_ENDING): name for name in names}
        where = str(bundle.path)
        try:
            signatures = {
                function: _signature(bundle.file(name)) for function, name in files.items()
            }
            declared = {name: layout_signature(name, each) for name, each in signatures.items()}
            _require_described(bundle, declared)
        except ValueError as error:
            raise BundleError(
                f"{where} is no model of edge-spec: {error}", remedy=EXPORT_AGAIN
            ) from None
        return cls(files, signatures, read_layout(declared, bundle.config, where))


def _signature(path: Path) -> GraphSignature:
    """Raises ValueError for a file that is no graph, or one of other values than ours have."""
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except DecodeError:
        raise ValueError(f"{path.name} is no ONNX graph") from None
    return GraphSignature(_values(graph.input), _values(graph.output))


def _values(declared: Any) -> dict[str, Value]:
    found = {}
    for each in declared:
        kind = each.type.tensor_type
        if kind.elem_type not in _DTYPES:
            raise ValueError(f"its {each.name} is of a type that none of ours has")
        shape = tuple(dimension.dim_value for dimension in kind.shape.dim)
        found[each.name] = Value(shape, _DTYPES[kind.elem_type])
    return found


def _require_described(bundle: Bundle, signatures: Mapping[str, Signature]) -> None:
    """Raises ValueError for states of another form than the manifest's model has, by which memory
    is taken."""
    config = bundle.config
    for name, each in signatures.items():
        found = [(shape[0], shape[1], shape[3]) for shape in each.states.values()]
        if found != [(1, config.num_kv_heads, config.head_dim)] * 2 * config.num_layers:
            raise ValueError(f"the states of its function {name} are not those of its manifest")
