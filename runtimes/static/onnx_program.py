"""Static ONNX graphs as a Program, whatever runs them.

The graphs take the states and return what their rows add (exporters/onnx/static_graph.py): the
states are arrays of the session, written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_spec.runtimes.static.interruption import Interruption
from edge_spec.runtimes.static.layout import SLOT_AXIS, Shape, Signature
from edge_spec.runtimes.static.slots import MASKED

PAST, NEW = "past.", "new."  # what the names of states start with, and of what is added to them
_PAST_MASK, _OWN_MASK = "past_mask", "own_mask"
_FRONT = (slice(None),) * SLOT_AXIS


class State(dict[str, np.ndarray]):
    """Arrays by the names of their inputs, and how a pass on them is ended."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.interruption = Interruption()


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
        return State(
            {name: np.zeros(each.shape, each.dtype) for name, each in self._states.items()}
        )

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State
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
        found = dict(self._engine.run(function, given | state, state.interruption))
        for name in self._states:
            state[name][(*_FRONT, own)] = found.pop(NEW + name.removeprefix(PAST))
        return found

    def interrupt(self, state: State) -> None:
        state.interruption.ask()

    def read_state(self, state: State, name: str) -> np.ndarray:
        return state[name].copy()

    def write_state(self, state: State, name: str, value: np.ndarray) -> None:
        state[name][...] = value


def layout_signature(function: str, graph: GraphSignature) -> Signature:
    """Returns what a graph is to a session (layout.py). Raises ValueError for one that is not as
    exporters/onnx/static_graph.py writes it."""
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
