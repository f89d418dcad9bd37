"""Static ONNX graphs as a Program, whatever runs them.

The graphs take the states and return what their rows add (exporters/onnx/static.py): the
states are arrays of the session, written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.static.session import (
    EXPORT_AGAIN,
    MASKED,
    SLOT_AXIS,
    Interruption,
    Layout,
    Shape,
    Signature,
    read_layout,
)

PAST, NEW = "past.", "new."  # what the names of states start with, and of what is added to them
_PAST_MASK, _OWN_MASK = "past_mask", "own_mask"
_FRONT = (slice(None),) * SLOT_AXIS


State = dict[str, np.ndarray]  # arrays by the names of their inputs


@dataclass(frozen=True)
class Value:
    """An input or output of a graph, as its file declares it."""

    shape: Shape
    dtype: np.dtype


@dataclass(frozen=True)
class GraphSignature:
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


class RunsGraphs(Protocol):
    """An engine that has the graphs of a bundle, by their functions' names."""

    def run(
        self, function: str, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> Mapping[str, np.ndarray]:
        """The outputs of the function's graph. Raises SessionError."""


class OnnxProgram:
    """Splits masks and keeps states for graphs that `engine` runs.

    signatures: of the graphs, by function; all have the same states.
    """

    def __init__(self, engine: RunsGraphs, signatures: Mapping[str, GraphSignature]) -> None:
        self._engine = engine
        inputs = next(iter(signatures.values())).inputs
        self._states = {name: each for name, each in inputs.items() if name.startswith(PAST)}
        self._mask_dtype = inputs[_PAST_MASK].dtype

    def make_state(self) -> State:
        return {name: np.zeros(each.shape, each.dtype) for name, each in self._states.items()}

    def predict(
        self,
        function: str,
        inputs: Mapping[str, np.ndarray],
        state: State,
        interruption: Interruption,
    ) -> Mapping[str, np.ndarray]:
        start = int(inputs["write_slot"][0])
        mask = inputs["mask"]
        own = slice(start, start + mask.shape[SLOT_AXIS])
        past = mask.astype(self._mask_dtype)
        past[..., own] = MASKED
        given = {
            "input_ids": inputs["input_ids"],
            "position_ids": inputs["position_ids"],
            _PAST_MASK: past,
            _OWN_MASK: np.ascontiguousarray(mask[..., own], self._mask_dtype),
        }
        found = dict(self._engine.run(function, given | state, interruption))
        for name in self._states:
            state[name][(*_FRONT, own)] = found.pop(NEW + name.removeprefix(PAST))
        return found

    def read_state(self, state: State, name: str) -> np.ndarray:
        return state[name].copy()

    def write_state(self, state: State, name: str, value: np.ndarray) -> None:
        state[name][...] = value


def layout_signature(function: str, graph: GraphSignature) -> Signature:
    """Returns what a graph is to a session. Raises ValueError for one that is not as
    exporters/onnx/static.py writes it."""
    inputs = {name: each.shape for name, each in graph.inputs.items()}
    states = {name: shape for name, shape in inputs.items() if name.startswith(PAST)}
    outputs = {name: each.shape for name, each in graph.outputs.items()}
    past, own = inputs.pop(_PAST_MASK, ()), inputs.pop(_OWN_MASK, ())
    if len(past) != 4 or own != (*past[:3], past[2]):
        raise ValueError(f"the masks of its function {function} have the shapes {past}, {own}")
    for name, shape in states.items():
        added = outputs.pop(NEW + name.removeprefix(PAST), ())
        if added != (*shape[:SLOT_AXIS], past[SLOT_AXIS], *shape[SLOT_AXIS + 1 :]):
            raise ValueError(f"its function {function} adds {added} to {name}, {shape}")
    given = {name: shape for name, shape in inputs.items() if name not in states}
    return Signature({**given, "write_slot": (1,), "mask": past}, outputs, states)


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
        names = [n for n in bundle.manifest.files if n.endswith(_ENDING) and "/" not in n]
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
