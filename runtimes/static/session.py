"""Models and sessions on static programs, whose passes have fixed numbers of rows.

Position and slot are independent: an accepted path stays where it was scored, and slots of rejected
rows remain as holes that masks hide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import (
    Capabilities,
    Forward,
    RuntimeOptions,
    require_rollback,
    require_room,
    require_state,
)
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError, SessionError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import context_tokens

Shape = tuple[int, ...]
EXPORT_AGAIN = "Export the model again with this version of edge-spec."
SLOT_AXIS = 2  # in every state
_INPUTS = ("input_ids", "position_ids", "write_slot", "mask")
_LOGITS = re.compile(r"logits(?:_(\d+))?")


@dataclass(frozen=True)
class Signature:
    """A function's shapes, as a package or program declares them."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    states: Mapping[str, Shape]


@dataclass(frozen=True)
class PassShape:
    """A function of `rows` rows."""

    function: str
    rows: int
    logits: tuple[str, ...]  # outputs to concatenate to the vocabulary; empty: prefills only
    has_hidden: bool


@dataclass(frozen=True)
class Layout:
    """A package's functions, by rows; of equally wide ones, those that only prefill come first."""

    passes: tuple[PassShape, ...]
    slots: int  # of the cache, one per token
    states: tuple[str, ...]

    @property
    def scoring(self) -> tuple[PassShape, ...]:
        return tuple(each for each in self.passes if each.logits)

    @property
    def max_rows(self) -> int:
        return self.scoring[-1].rows

    @property
    def hidden_states(self) -> bool:
        return all(each.has_hidden for each in self.scoring)


def read_layout(signatures: Mapping[str, Signature], config: ModelConfig, where: str) -> Layout:
    """Raises BundleError, which names `where`, for functions that our exporters do not write, or a
    cache too small for the context and a padded pass."""
    try:
        layout = _layout(signatures)
        vocabularies = {
            sum(signatures[each.function].outputs[name][-1] for name in each.logits)
            for each in layout.scoring
        }
        if vocabularies != {config.vocab_size}:
            found = ", ".join(map(str, sorted(vocabularies)))
            raise ValueError(f"it scores {found} tokens, the model has {config.vocab_size}")
        needed = config.context_length + layout.max_rows - 1
        if layout.slots < needed:
            raise ValueError(f"its cache has {layout.slots} slots and needs {needed}")
    except (IndexError, ValueError) as error:  # IndexError: an input without axes
        raise BundleError(
            f"{where} is no model of edge-spec: {error}", remedy=EXPORT_AGAIN
        ) from None
    return layout


def _layout(signatures: Mapping[str, Signature]) -> Layout:
    passes = [_pass_shape(name, signature) for name, signature in signatures.items()]
    if not any(each.logits for each in passes):
        raise ValueError("it has no function with an output called logits")
    states = {tuple(signature.states.items()) for signature in signatures.values()}
    if len(states) != 1:
        raise ValueError("its functions differ in their states")
    (shapes,) = states
    slots = {signature.inputs["mask"][-1] for signature in signatures.values()}
    slots |= {shape[SLOT_AXIS] if len(shape) > SLOT_AXIS else 0 for _, shape in shapes}
    if not shapes or len(slots) != 1:
        raise ValueError("its masks and states differ in their number of slots")
    passes.sort(key=lambda each: (each.rows, bool(each.logits)))
    return Layout(tuple(passes), slots.pop(), tuple(name for name, _ in shapes))


def _pass_shape(function: str, signature: Signature) -> PassShape:
    inputs = signature.inputs
    if set(inputs) != set(_INPUTS):
        raise ValueError(f"its function {function} takes {', '.join(inputs) or 'nothing'}")
    rows = inputs["input_ids"][-1]
    expected = ((1, rows), (rows,), (1,), (1, 1, rows, inputs["mask"][-1]))
    found = tuple(inputs[name] for name in _INPUTS)
    if found != expected:
        raise ValueError(f"the inputs of its function {function} have the shapes {found}")
    parts = {name: _LOGITS.fullmatch(name) for name in signature.outputs}
    scored = sorted((int(match[1] or 0), name) for name, match in parts.items() if match)
    logits = tuple(name for _, name in scored)
    for name, shape in signature.outputs.items():
        if shape[:1] != (rows,) or len(shape) != 2:
            raise ValueError(f"the output {name} of its function {function} has the shape {shape}")
    return PassShape(function, rows, logits, "hidden" in signature.outputs)


MASKED = -30000.0  # beyond any score, within float16
_FRONT = (slice(None),) * SLOT_AXIS


class StaticSession:
    """Pad passes to a function's rows. Written rows count once committed; a failed pass changes
    nothing that counts."""

    def __init__(self, program: Program, layout: Layout, context_length: int) -> None:
        self._program = program
        self._layout = layout
        self._context_length = context_length
        self._taken = np.empty(0, np.intp)  # slots of committed tokens, ascending
        self._state = program.make_state()
        self._scored = 0  # first slot of the last forward
        self._is_interrupted = False

    @property
    def length(self) -> int:
        return len(self._taken)

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
        self._taken = np.append(self._taken, self._scored + np.asarray(rows, np.intp))

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._taken = self._taken[:length]

    def state(self) -> dict[str, np.ndarray]:
        """Return each state's committed slots."""
        return {
            name: np.take(self._program.read_state(self._state, name), self._taken, SLOT_AXIS)
            for name in self._layout.states
        }

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        expected = {}
        for name in self._layout.states:
            array = self._program.read_state(self._state, name)
            shape = list(array.shape)
            shape[SLOT_AXIS] = length
            expected[name] = (shape, array.dtype)
        require_state(state, expected, length, self._context_length)
        self._hold(state, length)

    def interrupt(self) -> None:
        """Prevent further passes; the current one, of few rows, goes on."""
        self._is_interrupted = True

    def close(self) -> None:
        self._taken, self._state = self._taken[:0], None

    @property
    def _end(self) -> int:
        """Return the slot after the last committed one, where the next rows go."""
        return int(self._taken[-1]) + 1 if len(self._taken) else 0

    def _shape_for(self, rows: int, shapes: Sequence[PassShape]) -> PassShape:
        """Return the smallest function that holds the rows, else the largest, among those that fit
        the free slots. Frees holes first if needed. One always fits (see `read_layout`)."""
        wanted, slots = next((s for s in shapes if s.rows >= rows), shapes[-1]), self._layout.slots
        if self._end + wanted.rows > slots and self._end > self.length:
            self._hold(self.state(), self.length)
        fitting = [each for each in shapes if self._end + each.rows <= slots]
        return next((each for each in fitting if each.rows >= rows), fitting[-1])

    def _hold(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Copy these slots to the front of a new state, and use it once complete."""
        fresh = self._program.make_state()
        for name in self._layout.states:
            array = self._program.read_state(fresh, name)
            array[(*_FRONT, slice(0, length))] = state[name]
            self._program.write_state(fresh, name, array)
        self._state, self._taken = fresh, np.arange(length)

    def _run(
        self, shape: PassShape, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        """Run n rows. sees: [n, n] bool, which of them each sees besides all committed tokens."""
        if self._is_interrupted:
            raise SessionError("the session was interrupted", remedy="Begin a new one.")
        count, start = len(tokens), self._end
        ids = np.zeros((1, shape.rows), np.int32)
        ids[0, :count] = tokens
        positions = np.zeros(shape.rows, np.int32)
        positions[:count] = self.length + depths
        mask = np.full((shape.rows, self._layout.slots), MASKED, np.float16)
        mask[:count, self._taken] = 0
        mask[:count, start : start + count][sees] = 0
        padding = np.arange(count, shape.rows)
        mask[padding, start + padding] = 0  # attends only to itself
        inputs: dict[str, np.ndarray] = {
            "input_ids": ids,
            "position_ids": positions,
            "write_slot": np.array([start], np.int32),
            "mask": mask[None, None],
        }
        found = self._program.predict(shape.function, inputs, self._state)
        self._scored = start
        return found


class Program(Protocol):
    """A loaded package. A state is one session's cache."""

    def make_state(self) -> Any:
        """Return a new state of zeros."""

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: Any
    ) -> Mapping[str, np.ndarray]:
        """Return the function's outputs and write the state. Raises SessionError."""

    def read_state(self, state: Any, name: str) -> np.ndarray: ...

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None: ...


class StaticModel:
    """A program that sessions share."""

    def __init__(self, program: Program, layout: Layout, config: ModelConfig) -> None:
        self.config = config
        self.capabilities = Capabilities(
            max_rows=layout.max_rows,
            trees=True,
            rollback=True,
            hidden_states=layout.hidden_states,
        )
        self._program: Program | None = program
        self._layout = layout

    def open_session(self) -> StaticSession:
        assert self._program is not None, "the model is closed"
        return StaticSession(self._program, self._layout, self.config.context_length)

    def close(self) -> None:
        self._program = None


def config_of(bundle: Bundle, options: RuntimeOptions) -> ModelConfig:
    """Return the config with the requested context. Raises UsageError if the cache is shorter,
    unless options.may_hold_less."""
    config, wanted = bundle.config, options.context_length
    if wanted is None or (wanted > config.context_length and options.may_hold_less):
        return config
    if wanted > config.context_length:
        raise UsageError(
            f"the cache of {bundle.path} holds {config.context_length} tokens, not {wanted}",
            remedy=f"Choose a smaller --context, or export the model with --context {wanted}.",
        )
    return replace(config, context_length=wanted)


FLOAT, HALF = 4, 2  # bytes
_PADDING_SLOTS = 64  # at most, beyond the context


def session_bytes(
    bundle: Bundle, options: RuntimeOptions, num_tokens: int | None
) -> tuple[int, int]:
    """Return the bytes of a session's states, allocated at once for all slots, and of a prefill's
    scores."""
    config = bundle.config
    length, _ = context_tokens(config.context_length, options, num_tokens)
    element = FLOAT if bundle.manifest.quantization == "fp32" else HALF
    slots = config.context_length + _PADDING_SLOTS
    states = 2 * config.num_layers * config.kv_size * slots * element
    return states, FLOAT * config.num_heads * _PADDING_SLOTS * (length + _PADDING_SLOTS)
