"""Runs Core ML programs in numpy, on any system: slow, for checks.

A program is coremltools' own (pymil), just built or loaded from a package. Each of its functions
is turned into a list of steps once; what depends on no input is computed then. Where a program
says float16, arrays are float32 and hold numbers that float16 has: products then need no
conversion, and every result is rounded once, as on accelerators that sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_spec.errors import SessionError
from edge_spec.runtimes.coreml.signatures import is_half, is_state
from edge_spec.runtimes.mil.arithmetic import ARITHMETIC
from edge_spec.runtimes.mil.constants import CONSTEXPR, Constants, rounded, widened
from edge_spec.runtimes.mil.folding import folding
from edge_spec.runtimes.mil.movement import MOVEMENT, update_slice
from edge_spec.runtimes.mil.state_flow import plan_state, variables

State = dict[str, np.ndarray]
Values = list[Any]  # of a function's variables, by their place
Step = Callable[[Values, State], None]
Argument = int | list[int]  # the place of a variable; of several that are one argument


@dataclass(frozen=True)
class Interpreted:
    """One function, ready to run."""

    inputs: Mapping[str, int]  # places in `values`
    outputs: Mapping[str, int]
    half_outputs: frozenset[str]  # those that the program declares as float16
    values: Values  # constants; None for what a pass computes
    steps: Sequence[Step]

    def run(self, inputs: Mapping[str, np.ndarray], state: State) -> dict[str, np.ndarray]:
        """Outputs by name, in the program's types; writes the state, which a failed run may have
        written in part. Raises SessionError that names the operation that failed."""
        values = self.values.copy()
        for name, place in self.inputs.items():
            values[place] = widened(np.asarray(inputs[name]))
        with np.errstate(all="ignore"):  # float16 has infinities
            for step in self.steps:
                step(values, state)
            return {name: self._returned(name, values[at]) for name, at in self.outputs.items()}

    def _returned(self, name: str, value: np.ndarray) -> np.ndarray:
        """A copy: the value itself may be a view of the state."""
        return value.astype(np.float16 if name in self.half_outputs else value.dtype)


def interpret(function: Any, shared: Constants) -> Interpreted:
    """Plans a pymil Function. Raises UnsupportedModelError for operations that are not known."""
    return _Planner(function, shared).plan()


class _Planner:
    def __init__(self, function: Any, shared: Constants) -> None:
        self._function = function
        self._shared = shared
        self._state_plan = plan_state(function)
        self._places: dict[int, int] = {}  # of a variable, by its identity
        self._values: Values = []
        self._varies: list[bool] = []  # whether a pass computes it
        self._steps: list[Step] = []

    def plan(self) -> Interpreted:
        taken = {name: var for name, var in self._function.inputs.items() if not is_state(var)}
        inputs = {name: self._new(var) for name, var in taken.items()}
        with np.errstate(all="ignore"):
            for place, operation in enumerate(self._function.operations):
                self._plan(operation, place)
        returned = self._function.outputs
        return Interpreted(
            inputs=inputs,
            outputs={var.name: self._at(var) for var in returned},
            half_outputs=frozenset(var.name for var in returned if is_half(var)),
            values=self._values,
            steps=self._steps,
        )

    def _plan(self, operation: Any, place: int) -> None:
        kind = operation.op_type
        if all(var.val is not None for var in operation.outputs):
            return  # held once it is used: what compressed weights are made of never is
        if kind in CONSTEXPR:
            self._new(operation.outputs[0], self._shared.expanded(operation))
        elif kind == "read_state":
            self._steps.append(_reading(operation.inputs["input"].name, self._result(operation)))
        elif kind == "coreml_update_state":
            value = self._at(operation.inputs["value"])
            state = operation.inputs["state"].name
            self._steps.append(_writing(state, value, self._result(operation)))
        elif place in self._state_plan.in_place:
            arguments = self._arguments(operation)
            self._steps.append(_updating(operation, arguments, self._result(operation)))
        else:
            self._plan_computed(operation, place in self._state_plan.copied)

    def _plan_computed(self, operation: Any, copied: bool) -> None:
        """Computed now where it depends on no input."""
        varies = any(self._varies[self._at(var)] for var in variables(operation))
        arguments = self._arguments(operation)
        results = [self._new(var) for var in operation.outputs]
        step = _computing(operation, arguments, results, copied)
        if varies:
            self._steps.append(step)
            return
        step(self._values, {})
        for place in results:
            self._varies[place] = False

    def _arguments(self, operation: Any) -> dict[str, Argument]:
        return {
            name: [self._at(each) for each in var] if isinstance(var, Sequence) else self._at(var)
            for name, var in operation.inputs.items()
            if var is not None
        }

    def _at(self, var: Any) -> int:
        if id(var) not in self._places and var.val is not None:
            self._new(var, self._shared.held(var.val))
        return self._places[id(var)]

    def _result(self, operation: Any) -> int:
        return self._new(operation.outputs[0])

    def _new(self, var: Any, value: Any = None) -> int:
        self._places[id(var)] = len(self._values)
        self._values.append(value)
        self._varies.append(value is None)
        return self._places[id(var)]


def _reading(state_name: str, result: int) -> Step:
    def read(values: Values, state: State) -> None:
        values[result] = state[state_name]

    return read


def _writing(state_name: str, source: int, result: int) -> Step:
    def write(values: Values, state: State) -> None:
        # What was updated in place is the state itself; anything else may be used elsewhere.
        if values[source] is not state[state_name]:
            state[state_name] = values[source].copy()
        values[result] = state[state_name]

    return write


def _updating(operation: Any, arguments: dict[str, Argument], result: int) -> Step:
    name = _name(operation)

    def update(values: Values, state: State) -> None:
        given = _taken(values, arguments)
        try:
            update_slice(**given)
        except (IndexError, TypeError, ValueError) as error:
            raise _failed(name, error) from error
        values[result] = given["x"]

    return update


def _computing(
    operation: Any, arguments: dict[str, Argument], results: list[int], copied: bool
) -> Step:
    kind = operation.op_type
    moves = kind in MOVEMENT
    known = MOVEMENT.get(kind) or ARITHMETIC.get(kind)
    work = known or folding(operation)
    halves = [not moves and is_half(var) for var in operation.outputs]
    name = _name(operation)

    def compute(values: Values, state: State) -> None:
        try:
            found = work(**_taken(values, arguments))
        except (IndexError, TypeError, ValueError) as error:
            raise _failed(name, error) from error
        parts = [found.copy() if copied else found] if len(results) == 1 else found
        for place, part, half in zip(results, parts, halves, strict=True):
            values[place] = rounded(part) if half else part

    return compute


def _taken(values: Values, arguments: Mapping[str, Argument]) -> dict[str, Any]:
    return {
        name: values[at] if isinstance(at, int) else [values[each] for each in at]
        for name, at in arguments.items()
    }


def _name(operation: Any) -> str:
    """All that a step keeps of it: it would keep the whole program, stored weights included."""
    return f"{operation.op_type} {operation.name}"


def _failed(name: str, error: Exception) -> SessionError:
    return SessionError(
        f"{name} cannot be evaluated: {error}",
        remedy="Export the model again, or run it on macOS with --runtime coreml.",
    )
