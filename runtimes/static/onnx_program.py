"""Run static ONNX graphs (exporters/onnx/static.py) as a Program. They read the states, which are
the session's arrays, and return their rows' entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, TensorProto, ValueInfoProto

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.static.session import (
    EXPORT_AGAIN,
    MASKED,
    SLOT_AXIS,
    Layout,
    Shape,
    Signature,
    read_layout,
)

PAST, NEW = "past.", "new."  # prefixes of states, and of entries to add
_PAST_MASK, _OWN_MASK = "past_mask", "own_mask"
_FRONT = (slice(None),) * SLOT_AXIS


State = dict[str, np.ndarray]  # by input name


class OnnxProgram(ABC):
    """Split masks and keep states for graphs that a subclass runs."""

    def __init__(self, opened: OpenedGraphs) -> None:
        self._states = opened.states
        self._dtypes = opened.dtypes

    @abstractmethod
    def run(self, function: str, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the outputs of a function's graph. Raises SessionError."""

    def make_state(self) -> State:
        return {name: np.zeros(shape, self._dtypes[name]) for name, shape in self._states.items()}

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State
    ) -> Mapping[str, np.ndarray]:
        start = int(inputs["write_slot"][0])
        mask = inputs["mask"]
        own = slice(start, start + mask.shape[SLOT_AXIS])
        past = mask.astype(self._dtypes[_PAST_MASK])
        past[..., own] = MASKED
        given = {
            "input_ids": inputs["input_ids"],
            "position_ids": inputs["position_ids"],
            _PAST_MASK: past,
            _OWN_MASK: np.ascontiguousarray(mask[..., own], past.dtype),
        }
        found = dict(self.run(function, given | state))
        for name in self._states:
            state[name][(*_FRONT, own)] = found.pop(NEW + name.removeprefix(PAST))
        return found

    def read_state(self, state: State, name: str) -> np.ndarray:
        return state[name].copy()

    def write_state(self, state: State, name: str, value: np.ndarray) -> None:
        state[name][...] = value


FORMAT = "onnx-static"
DATA_FILE = "model.onnx.data"  # all functions' weights
_ENDING = ".onnx"
_DTYPES: Mapping[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.INT32: np.dtype(np.int32),
}


@dataclass(frozen=True)
class OpenedGraphs:
    """A bundle's graphs by function. All have the same states."""

    files: Mapping[str, str]  # names in the bundle
    layout: Layout
    states: Mapping[str, Shape]
    dtypes: Mapping[str, np.dtype]  # of inputs and outputs

    @classmethod
    def of(cls, bundle: Bundle, format: str = FORMAT) -> OpenedGraphs:
        """Raises UsageError for another format, BundleError if the graphs do not fit the
        manifest."""
        if bundle.manifest.format != format:
            raise UsageError(
                f"{bundle.path} is a bundle of format {bundle.manifest.format}, not {format}",
                remedy=f"Export the model with --format {format}.",
            )
        names = [n for n in bundle.manifest.files if n.endswith(_ENDING) and "/" not in n]
        files = {name.removesuffix(_ENDING): name for name in names}
        where = str(bundle.path)
        signatures: dict[str, Signature] = {}
        dtypes: dict[str, np.dtype] = {}
        try:
            for function, name in files.items():
                graph = _read_graph(bundle.file(name))
                dtypes = {each.name: _dtype(each) for each in (*graph.input, *graph.output)}
                signatures[function] = _signature(function, graph)
            _require_described(bundle, signatures)
        except ValueError as error:
            raise BundleError(
                f"{where} is no model of edge-spec: {error}", remedy=EXPORT_AGAIN
            ) from None
        layout = read_layout(signatures, bundle.config, where)
        states = next(iter(signatures.values())).states
        return cls(files, layout, states, dtypes)


def _read_graph(path: Path) -> GraphProto:
    try:
        return onnx.load(str(path), load_external_data=False).graph
    except DecodeError:
        raise ValueError(f"{path.name} is no ONNX graph") from None


def _signature(function: str, graph: GraphProto) -> Signature:
    """Return a graph's signature. Raises ValueError unless exporters/onnx/static.py could have
    written it."""
    inputs, outputs = ({each.name: _shape(each) for each in d} for d in (graph.input, graph.output))
    states = {name: shape for name, shape in inputs.items() if name.startswith(PAST)}
    past, own = inputs.pop(_PAST_MASK, ()), inputs.pop(_OWN_MASK, ())
    if len(past) != 4 or own != (*past[:3], past[2]):
        raise ValueError(f"the masks of its function {function} have the shapes {past}, {own}")
    for name, shape in states.items():
        added = outputs.pop(NEW + name.removeprefix(PAST), ())
        if added != (*shape[:SLOT_AXIS], past[SLOT_AXIS], *shape[SLOT_AXIS + 1 :]):
            raise ValueError(f"its function {function} adds {added} to {name}, {shape}")
    given = {name: shape for name, shape in inputs.items() if name not in states}
    return Signature({**given, "write_slot": (1,), "mask": past}, outputs, states)


def _shape(value: ValueInfoProto) -> Shape:
    return tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def _dtype(value: ValueInfoProto) -> np.dtype:
    found = _DTYPES.get(value.type.tensor_type.elem_type)
    if found is None:
        raise ValueError(f"its {value.name} is of a type that none of ours has")
    return found


def _require_described(bundle: Bundle, signatures: Mapping[str, Signature]) -> None:
    """Raises ValueError unless states have the manifest's sizes, which determine memory."""
    config = bundle.config
    for name, each in signatures.items():
        found = [(shape[0], shape[1], shape[3]) for shape in each.states.values()]
        if found != [(1, config.num_kv_heads, config.head_dim)] * 2 * config.num_layers:
            raise ValueError(f"the states of its function {name} are not those of its manifest")
