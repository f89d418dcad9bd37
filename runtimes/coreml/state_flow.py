"""Which updates of a state a function may make in place, without copying the whole cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edge_spec.runtimes.coreml.operations import VIEWS


def in_place_updates(function: Any) -> frozenset[int]:
    """Places in `function.operations` of the slice updates that end in an update of the state they
    began with, and after which nobody looks at what the state was before."""
    return frozenset(_Flow(function).safe())


class _Flow:
    """What a state holds changes with each update: its versions, and the last use of each."""

    def __init__(self, function: Any) -> None:
        self._operations = list(function.operations)
        self._made_by: dict[int, int] = {}  # place of the operation that makes a variable
        self._version: dict[int, int] = {}  # of a variable: the one it is, or is a view of
        self._last_use: dict[int, int] = {}  # of a version
        held: dict[str, int] = {}  # the version that a state holds
        for place, operation in enumerate(self._operations):
            for var in variables(operation):
                self._last_use[self._of(var)] = place
            source = operation.inputs.get("x")
            for var in operation.outputs:
                self._made_by[id(var)] = place
                if operation.op_type == "read_state":
                    state = operation.inputs["input"].name
                    self._version[id(var)] = held.setdefault(state, id(var))
                elif operation.op_type == "coreml_update_state":
                    held[operation.inputs["state"].name] = self._of(operation.inputs["value"])
                    self._version[id(var)] = self._of(operation.inputs["value"])
                elif operation.op_type in VIEWS and source is not None:
                    self._version[id(var)] = self._of(source)
        for var in function.outputs:
            self._last_use[self._of(var)] = len(self._operations)

    def safe(self) -> Iterator[int]:
        """A chain of slice updates is safe as a whole or not at all."""
        for place, operation in enumerate(self._operations):
            if operation.op_type != "coreml_update_state":
                continue
            chain, first = self._chain(operation.inputs["value"])
            if not chain or not self._is_held(first, operation, chain[-1]):
                continue
            state = _state(operation)
            reads = any(_state(each) == state for each in self._operations[chain[-1] : place])
            uses = (self._last_use[self._of(self._operations[at].inputs["x"])] for at in chain)
            if not reads and all(use == at for use, at in zip(uses, chain, strict=True)):
                yield from chain

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
