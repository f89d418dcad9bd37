"""Writes and reads programs as packages on disk, of a specification and one weight file for all
functions, and runs them in numpy, on any system: slow, to check what was written.

A program is coremltools' own (pymil), just built or loaded from a package. Each of its functions
is turned into a list of steps once. Where a program says float16, arrays are float32 and hold
numbers that float16 has: products then need no conversion, and every result is rounded once, as on
accelerators that sum in float32.

A state is written in place. That is exact because nothing but slices and updates may look at one,
a slice is a copy, and what a state was before an update is gone after it: a program that looks at
it again, which Core ML would allow, fails here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Program
from coremltools.converters.mil.converter import ConverterRegistry, mil_convert_to_proto
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.converters.mil.mil import types

from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.exporters.coreml.graph import EXACT, OPERATIONS, update_slice
from edge_spec.exporters.static_layout import MASKED, SCORING_ROWS, functions

COMPUTE = "edge_spec.compute"  # user-defined metadata: the unit that the program is laid out for
SPECIFICATION = 9  # iOS 18, macOS 15


def save_package(program: Program, path: Path, compute: str) -> None:
    """Writes `path`, a new .mlpackage, which needs iOS 18 or macOS 15."""
    # Beside it: weights are moved, not copied, within a disk. Progress bars are coremltools' own.
    with TemporaryDirectory(dir=path.parent) as weights, redirect_stderr(StringIO()):
        specification: Any
        specification, _ = mil_convert_to_proto(
            program,
            "milinternal",
            "mlprogram",
            ConverterRegistry,
            main_pipeline=ct.PassPipeline.EMPTY,  # the program is saved as it was built
            specification_version=SPECIFICATION,
            weights_dir=weights,
            export_multi_functions=True,
        )
        specification.description.metadata.userDefined[COMPUTE] = compute
        ct.utils.save_spec(specification, str(path), weights_dir=weights)


def read_function(package: Path, specification: Any, name: str) -> Any:
    """Reads one function of a package back, as pymil has it, with its weights."""
    alone = type(specification)()
    alone.specificationVersion = specification.specificationVersion
    source = specification.mlProgram
    alone.mlProgram.version = source.version
    alone.mlProgram.functions[name].CopyFrom(source.functions[name])
    weights = package / "Data" / "com.apple.CoreML" / "weights"
    return load(alone, SPECIFICATION, str(weights)).functions[name]


class Constants:
    """Holds the constants that functions of one program share, equal ones once."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def held(self, value: Any) -> Any:
        """Arrays widened; others as they are."""
        if not isinstance(value, np.ndarray):
            return value
        return self._once(_digest(value), lambda: widened(value))

    def expanded(self, operation: Any) -> np.ndarray:
        """The weights that a constexpr operation of pymil stands for."""
        parts = {name: self._part(var) for name, var in operation.inputs.items() if var is not None}
        key = [operation.op_type, *(f"{name} {_digest(part)}" for name, part in parts.items())]
        return self._once(" ".join(key), lambda: self._expand(operation, parts))

    def _part(self, var: Any) -> np.ndarray:
        return np.asarray(self.expanded(var.op) if var.val is None else var.val)

    def _expand(self, operation: Any, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        weights = CONSTEXPR[operation.op_type](**parts)
        return rounded(weights) if is_half(operation.outputs[0]) else weights

    def _once(self, key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._held:
            array = make()
            array.flags.writeable = False
            self._held[key] = array
        return self._held[key]


def is_half(var: Any) -> bool:
    """Returns whether a pymil Var is of float16."""
    return bool(var.dtype == types.fp16)


def widened(array: np.ndarray) -> np.ndarray:
    """A copy in float32, int32, bool, or as it is for anything else."""
    if array.dtype == np.bool_:
        return array.copy()
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    return array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array


def rounded(array: np.ndarray) -> np.ndarray:
    """Float32 numbers that float16 has; too large ones become infinite."""
    return array.astype(np.float16).astype(np.float32)


def blockwise_shift_scale(
    data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None
) -> np.ndarray:
    """scale * (data - offset) in float32, each number with its block's scale and offset.

    Along each axis, a block is as long as data's size over scale's.
    """
    blocks, single = _blocks(data.shape, scale.shape)
    values = data.astype(np.float32).reshape(blocks)
    if offset is not None:
        values -= offset.astype(np.float32).reshape(single)
    values *= scale.astype(np.float32).reshape(single)
    return values.reshape(data.shape)


def lut_to_dense(
    indices: np.ndarray, lut: np.ndarray, vector_axis: np.ndarray | None = None
) -> np.ndarray:
    """Each index replaced by its entry of its group's table.

    lut: [groups of each axis of indices.., entries, 1]. Raises ValueError for tables of vectors.
    """
    *groups, entries, vector_size = lut.shape
    if vector_size != 1:
        raise ValueError(f"a table of vectors of {vector_size}")
    blocks, single = _blocks(indices.shape, tuple(groups))
    first = np.arange(math.prod(groups), dtype=np.int32) * np.int32(entries)
    entry = indices.astype(np.int32).reshape(blocks) + first.reshape(single)
    return lut.astype(np.float32).ravel()[entry].reshape(indices.shape)


CONSTEXPR: Mapping[str, Callable[..., np.ndarray]] = {
    "constexpr_blockwise_shift_scale": blockwise_shift_scale,
    "constexpr_lut_to_dense": lut_to_dense,
}


def _blocks(shape: tuple[int, ...], groups: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns how to reshape an array of `shape` and what there is of each group, so that they go
    together: [groups, block, groups, block, ..] and [groups, 1, groups, 1, ..]."""
    pairs = list(zip(shape, groups, strict=True))
    blocks = [part for size, count in pairs for part in (count, size // count)]
    return blocks, [part for count in groups for part in (count, 1)]


def _digest(array: np.ndarray) -> str:
    content = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    return f"{array.dtype} {array.shape} {content}"


State = dict[str, np.ndarray]
Values = list[Any]  # of a function's variables, by their place


@dataclass(frozen=True)
class Step:
    """One operation. It keeps nothing else of the program, which has the stored weights."""

    name: str
    work: Callable[..., Any]
    arguments: Mapping[str, int | tuple[int, ...]]  # places of variables
    results: Sequence[int]
    halves: Sequence[bool]  # which results are rounded to float16
    state: int | None  # the place of the state that it updates

    def run(self, values: Values) -> None:
        """Raises SessionError."""
        given = {
            name: values[at] if isinstance(at, int) else [values[each] for each in at]
            for name, at in self.arguments.items()
        }
        try:
            found = self.work(**given)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise SessionError(
                f"{self.name} cannot be evaluated: {error}",
                remedy="Export the model again, or run it on macOS with --runtime coreml.",
            ) from error
        if self.state is not None:
            found = values[self.state]
            values[:] = [None if each is found else each for each in values]  # what it was is gone
        parts = [found] if len(self.results) == 1 else found
        for place, part, half in zip(self.results, parts, self.halves, strict=True):
            values[place] = rounded(part) if half else part


@dataclass(frozen=True)
class Interpreted:
    """One function, ready to run."""

    inputs: Mapping[str, int]  # places in `values`
    states: Mapping[str, int]
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
        for name, place in self.states.items():
            values[place] = state[name]
        with np.errstate(all="ignore"):  # float16 has infinities
            for step in self.steps:
                step.run(values)
            return {name: self._returned(name, values[at]) for name, at in self.outputs.items()}

    def _returned(self, name: str, value: np.ndarray) -> np.ndarray:
        return value.astype(np.float16 if name in self.half_outputs else value.dtype)


def interpret(function: Any, shared: Constants) -> Interpreted:
    """Plans a pymil Function. Raises UnsupportedModelError for operations that are not known."""
    return _Planner(function, shared).plan()


def is_state(var: Any) -> bool:
    """Returns whether a pymil Var is a function's state."""
    return bool(types.is_state(var.sym_type))


# Operations that return a state as it is, and their argument that is one.
_STATE_OF = {"read_state": "input", "coreml_update_state": "value"}


class _Planner:
    def __init__(self, function: Any, shared: Constants) -> None:
        self._function = function
        self._shared = shared
        self._places: dict[int, int] = {}  # of a variable, by its identity
        self._states: set[int] = set()  # places of what is a state, before or after an update
        self._values: Values = []
        self._steps: list[Step] = []

    def plan(self) -> Interpreted:
        given = {name: self._new(var) for name, var in self._function.inputs.items()}
        states = {name for name, var in self._function.inputs.items() if is_state(var)}
        self._states = {given[name] for name in states}
        for operation in self._function.operations:
            self._plan(operation)
        returned = self._function.outputs
        return Interpreted(
            inputs={name: place for name, place in given.items() if name not in states},
            states={name: given[name] for name in states},
            outputs={var.name: self._at(var) for var in returned},
            half_outputs=frozenset(var.name for var in returned if is_half(var)),
            values=self._values,
            steps=self._steps,
        )

    def _plan(self, operation: Any) -> None:
        kind = operation.op_type
        if all(var.val is not None for var in operation.outputs):
            return  # held once it is used: what compressed weights are made of never is
        if kind in CONSTEXPR:
            self._new(operation.outputs[0], self._shared.expanded(operation))
            return
        arguments = self._arguments(operation)
        source = arguments.get(_STATE_OF.get(kind, ""))
        if source in self._states:
            self._places[id(operation.outputs[0])] = source
            return
        results = [self._new(var) for var in operation.outputs]
        name = f"{kind} {operation.name}"
        state = arguments["x"] if kind == "slice_update" else None
        if state in self._states:
            self._states.update(results)
            given = {key: arguments[key] for key in ("x", "update", "begin", "end")}
            self._steps.append(Step(name, update_slice, given, results, [False], state))
            return
        looks = kind != "slice_by_index" and self._states & set(arguments.values())
        if kind not in OPERATIONS or looks:
            raise UnsupportedModelError(
                f"the numpy evaluation of Core ML programs does not know {name} as it is used",
                remedy="Export it with --no-check, and run the package on macOS with --runtime "
                "coreml.",
            )
        halves = [kind not in EXACT and is_half(var) for var in operation.outputs]
        self._steps.append(Step(name, OPERATIONS[kind], arguments, results, halves, None))

    def _arguments(self, operation: Any) -> dict[str, Any]:
        return {
            name: tuple(self._at(each) for each in var)
            if isinstance(var, Sequence)
            else self._at(var)
            for name, var in operation.inputs.items()
            if var is not None
        }

    def _at(self, var: Any) -> int:
        if id(var) not in self._places and var.val is not None:
            self._new(var, self._shared.held(var.val))
        return self._places[id(var)]

    def _new(self, var: Any, value: Any = None) -> int:
        self._places[id(var)] = len(self._values)
        self._values.append(value)
        return self._places[id(var)]


def scored_in_numpy(
    package: Path, vocab_size: int, slots: int
) -> Callable[[Sequence[int], Callable[[float], None]], np.ndarray]:
    """Returns what scores a text (see `exporters.parity.Score`).

    slots: of the package's cache. What is returned raises UnsupportedModelError for a program
    that this exporter does not write, and SessionError where one cannot be evaluated.
    """

    def score(tokens: Sequence[int], on_chunk: Callable[[float], None]) -> np.ndarray:
        specification = ct.models.utils.load_spec(str(package))
        names = {each.rows: each.name for each in functions() if each.scores}
        planned: dict[int, Interpreted] = {}
        constants = Constants()
        described = specification.description.functions[0].state
        state = {
            each.name: np.zeros(tuple(each.type.stateType.arrayType.shape), np.float32)
            for each in described
        }
        count = len(tokens) - 1
        scores = np.empty((count, vocab_size), np.float32)
        for start in range(0, count, max(SCORING_ROWS)):
            chunk = tokens[start : min(start + max(SCORING_ROWS), count)]
            rows = next(each for each in SCORING_ROWS if each >= len(chunk))
            if rows not in planned:
                function = read_function(package, specification, names[rows])
                planned[rows] = interpret(function, constants)
            found = planned[rows].run(_inputs(chunk, rows, start, slots), state)
            parts = [value for name, value in found.items() if name.startswith("logits")]
            end = start + len(chunk)
            scores[start:end] = np.concatenate(parts, axis=1)[: len(chunk)]
            on_chunk(end / count)
        return scores

    return score


def _inputs(chunk: Sequence[int], rows: int, start: int, slots: int) -> dict[str, np.ndarray]:
    """Returns those of a pass over a chain that begins at `start` and is padded to `rows`."""
    ids = np.zeros((1, rows), np.int32)
    ids[0, : len(chunk)] = chunk
    positions = np.zeros(rows, np.int32)
    positions[: len(chunk)] = start + np.arange(len(chunk))
    sees = np.arange(slots) <= start + np.arange(rows)[:, None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "write_slot": np.array([start], np.int32),
        "mask": np.where(sees, 0, MASKED).astype(np.float16)[None, None],
    }
