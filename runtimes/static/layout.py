"""Reads the form of a static program: its functions, how wide each is, what its state holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edge_spec.core.config import ModelConfig
from edge_spec.errors import BundleError

Shape = tuple[int, ...]
EXPORT_AGAIN = "Export the model again with this version of edge-spec."
SLOT_AXIS = 2  # of every state
_INPUTS = ("input_ids", "position_ids", "write_slot", "mask")
_LOGITS = re.compile(r"logits(?:_(\d+))?")


@dataclass(frozen=True)
class Signature:
    """Describes one function, as a package or a program declares it."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    states: Mapping[str, Shape]


@dataclass(frozen=True)
class PassShape:
    """A function that runs `rows` rows."""

    function: str
    rows: int
    logits: tuple[str, ...]  # outputs, side by side the vocabulary; empty: it scores nothing
    has_hidden: bool


@dataclass(frozen=True)
class Layout:
    """Describes a package for a session. Passes are ordered by rows, and of equally wide
    ones those that score nothing come first."""

    passes: tuple[PassShape, ...]
    slots: int  # of the cache, one a token
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
    """Raises BundleError, which names `where`, for functions of another form than exporters/coreml
    writes, and for a cache too small for the context and a padded pass."""
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
    except (IndexError, ValueError) as error:  # IndexError: an input that is no array
        raise BundleError(
            f"{where} is no model of edge-spec: {error}", remedy=EXPORT_AGAIN
        ) from None
    return layout


def _layout(signatures: Mapping[str, Signature]) -> Layout:
    """Raises ValueError."""
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
