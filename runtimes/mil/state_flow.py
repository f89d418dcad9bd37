"""Which updates of a state a function may make in place, without copying the whole cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.runtimes.mil.movement import SLICES, VIEWS


@dataclass(frozen=True)
class StatePlan:
    """Places in `function.operations`."""

    in_place: frozenset[int]  # slice updates that may write the state itself
    copied: frozenset[int]  # slices of a state that are used after it is written in place


def plan_state(function: Any) -> StatePlan:
    """A slice update may write the state that it begins with where it ends in an update of that
    state, and nobody looks later at what the state was before, but through a slice: those are
    copied."""
    flow = _Flow(function)
    in_place = frozenset(flow.in_place())
    return StatePlan(in_place, frozenset(flow.copied(in_place)))


class _Flow:
    """What a state holds changes with each update: its versions, and the last use of each."""

    def __init__(self, function: Any) -> None:
        self._operations = list(function.operations)
        self._made_by: dict[int, int] = {}  # place of the operation that makes a variable
        self._version: dict[int, int] = {}  # of a variable: the one it is, or is a view of
        self._last_use: dict[int, int] = {}  # of a version
        self._sliced: dict[int, int] = {}  # place of a slice -> the state's version
        held: dict[str, int] = {}  # the version that a state holds
        for place, operation in enumerate(self._operations):
            for var in variables(operation):
                self._last_use[self._of(var)] = place
            for var in operation.outputs:
                self._made_by[id(var)] = place
            self._follow(place, operation, held)
        for var in function.outputs:
            self._last_use[self._of(var)] = len(self._operations)

    def _follow(self, place: int, operation: Any, held: dict[str, int]) -> None:
        """What the results are views of."""
        kind, first = operation.op_type, operation.outputs[0]
        state = _state(operation)
        if kind == "read_state" and state is not None:
            self._version[id(first)] = held.setdefault(state, id(first))
        elif state is not None:
            held[state] = self._version[id(first)] = self._of(operation.inputs["value"])
        elif kind in VIEWS:
            source = self._of(operation.inputs["x"])
            if kind in SLICES and source in held.values():
                self._sliced[place] = source
            else:
                self._version.update({id(var): source for var in operation.outputs})

    def in_place(self) -> Iterator[int]:
        """A chain of slice updates may as a whole or not at all."""
        for place, operation in enumerate(self._operations):
            if operation.op_type != "coreml_update_state":
                continue
            chain, first = self._chain(operation.inputs["value"])
            if not chain or not self._is_held(first, operation, chain[-1]):
                continue
            state = _state(operation)
            reads = any(_state(each) == state for each in self._operations[chain[-1] : place])
            if not reads and all(self._last_use[self._begun_with(at)] == at for at in chain):
                yield from chain

    def copied(self, in_place: frozenset[int]) -> Iterator[int]:
        for place, version in self._sliced.items():
            last = self._last_use.get(id(self._operations[place].outputs[0]), place)
            if any(self._begun_with(at) == version and place < at < last for at in in_place):
                yield place

    def _begun_with(self, place: int) -> int:
        """The version that a slice update changes."""
        return self._of(self._operations[place].inputs["x"])

    def _chain(self, value: Any) -> tuple[list[int], Any]:
        """Places of the slice updates that made `value`, last first, and what they began with."""
        chain = []
        place = self._made_by.get(id(value))
        while place is not None and self._operations[place].op_type == "slice_update":
            chain.append(place)
            value = self._operations[place].inputs["x"]
            place = self._made_by.get(id(value))
        return chain, value

    def _is_held(self, first: Any, update: Any, before: int) -> bool:
        """Whether `first` is all that the state of `update` holds just before a place."""
        state = _state(update)
        earlier = reversed(self._operations[:before])
        last = next((each for each in earlier if _state(each) == state), None)
        return last is not None and first is last.outputs[0]

    def _of(self, var: Any) -> int:
        return self._version.get(id(var), id(var))


def _state(operation: Any) -> str | None:
    """The state that an operation reads or updates."""
    if operation.op_type == "read_state":
        return str(operation.inputs["input"].name)
    if operation.op_type == "coreml_update_state":
        return str(operation.inputs["state"].name)
    return None


def variables(operation: Any) -> Iterator[Any]:
    """The variables that an operation takes."""
    for value in operation.inputs.values():
        if isinstance(value, Sequence):
            yield from value
        elif value is not None:
            yield value
