"""A session on a static program, whatever runs it: its passes have fixed numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.runtimes.static.interruption import Interruption
from edge_spec.runtimes.static.layout import SLOT_AXIS, Layout, PassShape
from edge_spec.runtimes.static.slots import Slots

_FRONT = (slice(None),) * SLOT_AXIS


class StaticSession:
    """A pass is padded to the rows of a function; what it has written counts once it is committed.

    A pass that fails changes nothing that counts.
    """

    def __init__(self, program: Program, layout: Layout, context_length: int) -> None:
        self._program = program
        self._layout = layout
        self._context_length = context_length
        self._slots = Slots(layout.slots)
        self._state = program.make_state()
        self._scored = 0  # where the rows of the last forward begin
        self._interruption = Interruption()

    @property
    def length(self) -> int:
        return len(self._slots)

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._context_length)
        left = np.asarray(tokens, np.int32)
        while len(left):
            shape = self._shape_for(len(left), self._layout.passes)
            chunk, left = left[: shape.rows], left[shape.rows :]
            rows = np.arange(len(chunk), dtype=np.int32)
            self._run(shape, chunk, rows, np.tri(len(chunk), dtype=bool))
            self.commit(range(len(chunk)))

    def forward(self, tree: TokenTree) -> Forward:
        require_room(self.length, len(tree), self._context_length)
        if len(tree) > self._layout.max_rows:
            raise UsageError(
                f"a pass of {len(tree)} rows, and the functions have up to {self._layout.max_rows}",
                remedy="Draft fewer tokens at once.",
            )
        shape = self._shape_for(len(tree), self._layout.scoring)
        found = self._run(shape, tree.tokens, tree.depths, tree.ancestors)
        rows = len(tree)
        parts = [found[name][:rows].astype(np.float32) for name in shape.logits]
        logits = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        hidden = found["hidden"][:rows].astype(np.float32) if shape.has_hidden else None
        return Forward(logits, hidden)

    def commit(self, rows: Sequence[int]) -> None:
        self._slots.take([self._scored + row for row in rows])

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._slots.forget(length)

    def state(self) -> dict[str, np.ndarray]:
        """Each of the package's states, with `length` slots."""
        return {
            name: self._slots.taken(self._program.read_state(self._state, name), SLOT_AXIS)
            for name in self._layout.states
        }

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        fresh = self._program.make_state()
        empty = {name: self._program.read_state(fresh, name) for name in self._layout.states}
        expected = {}
        for name, array in empty.items():
            shape = list(array.shape)
            shape[SLOT_AXIS] = length
            expected[name] = (shape, array.dtype)
        require_state(state, expected, length, self._context_length)
        for name, array in empty.items():
            array[(*_FRONT, slice(0, length))] = state[name]
            self._program.write_state(fresh, name, array)
        self._state = fresh
        self._slots.forget(0)
        self._slots.take(range(length))

    def interrupt(self) -> None:
        """The pass that runs goes on where its engine cannot end it."""
        self._interruption.ask()
        if isinstance(self._program, InterruptibleProgram) and (state := self._state) is not None:
            self._program.interrupt(state)

    def close(self) -> None:
        self._slots.forget(0)
        self._state = None

    def _shape_for(self, rows: int, shapes: Sequence[PassShape]) -> PassShape:
        """The smallest function that holds the rows, or the largest, of those that fit the slots.

        Slots are made free where holes are in the way. One always fits: the cache has room for a
        padded pass after a full context.
        """
        wanted = next((each for each in shapes if each.rows >= rows), shapes[-1])
        if not self._slots.fits(wanted.rows) and self._slots.has_holes:
            self._compact()
        fitting = [each for each in shapes if self._slots.fits(each.rows)]
        return next((each for each in fitting if each.rows >= rows), fitting[-1])

    def _compact(self) -> None:
        """Moves the committed tokens' keys and values together, in a new state: whatever fails on
        the way, the old one still holds all."""
        state = self._program.make_state()
        for name in self._layout.states:
            scattered = self._program.read_state(self._state, name)
            self._program.write_state(state, name, self._slots.compacted(scattered, SLOT_AXIS))
        self._state = state
        self._slots.compact()

    def _run(
        self, shape: PassShape, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One pass over rows that stand after the committed tokens."""
        self._interruption.require_none()
        count = len(tokens)
        ids = np.zeros((1, shape.rows), np.int32)
        ids[0, :count] = tokens
        positions = np.zeros(shape.rows, np.int32)
        positions[:count] = self.length + depths
        start = self._slots.end
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "write_slot": np.array([start], np.int32),
            "mask": self._slots.mask(sees, shape.rows),
        }
        found = dict(self._program.predict(shape.function, inputs, self._state))
        self._scored = start
        return found


class Program(Protocol):
    """A package that is ready to run. A state is the cache of one session."""

    def make_state(self) -> Any:
        """A new state, all zeros."""

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: Any
    ) -> Mapping[str, np.ndarray]:
        """The function's outputs; writes the state. Raises SessionError."""

    def read_state(self, state: Any, name: str) -> np.ndarray: ...

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None: ...


@runtime_checkable
class InterruptibleProgram(Program, Protocol):
    """One whose engine can end a pass before its end."""

    def interrupt(self, state: Any) -> None:
        """Ends the pass on this state that runs, and any later one. Any thread may call."""
