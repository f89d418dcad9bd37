"""What the inputs and outputs of a graph with growing keys and values say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.errors import BundleError

KNOWN_INPUTS = ("input_ids", "attention_mask", "position_ids")
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(frozen=True)
class CacheArray:
    """The keys or the values of one layer, [1, heads, tokens, size] float32."""

    past: str  # the name of the input
    present: str  # and of the output
    heads: int
    size: int

    @property
    def width(self) -> int:
        """Elements of one token."""
        return self.heads * self.size


@dataclass(frozen=True)
class GrowingGraph:
    """inputs: those of KNOWN_INPUTS that the graph takes."""

    inputs: tuple[str, ...]
    arrays: tuple[CacheArray, ...]
    vocab_size: int

    @classmethod
    def of(cls, inference: Any, path: Path) -> GrowingGraph:
        """Reads an InferenceSession's signature.

        Raises BundleError for anything but float32 caches [batch, heads, tokens, size], inputs
        that are known, and an output for each cache.
        """
        inputs = {value.name: value for value in inference.get_inputs()}
        outputs = {value.name: value for value in inference.get_outputs()}
        arrays = []
        for name, value in inputs.items():
            if name in KNOWN_INPUTS:
                continue
            present = name.replace(_PAST, _PRESENT)
            if not name.startswith(_PAST) or present not in outputs:
                raise _unusable(path, f"an input {name}")
            heads, size = _dimensions(path, name, value)
            arrays.append(CacheArray(name, present, heads, size))
        scores = outputs.get("logits")
        if "input_ids" not in inputs or not arrays or scores is None:
            raise _unusable(path, "no input_ids, past_key_values and logits")
        vocab_size = scores.shape[-1]
        if len(outputs) != len(arrays) + 1 or not isinstance(vocab_size, int):
            raise _unusable(path, f"outputs {sorted(outputs)}"[:200])
        taken = tuple(name for name in KNOWN_INPUTS if name in inputs)
        return cls(taken, tuple(arrays), vocab_size)


def _dimensions(path: Path, name: str, value: Any) -> tuple[int, int]:
    shape: Sequence[int | str] = value.shape
    if value.type != "tensor(float)" or len(shape) != 4:
        raise _unusable(path, f"{name} of {value.type} and the shape {shape}")
    heads, tokens, size = shape[1:]
    if not isinstance(heads, int) or not isinstance(size, int) or isinstance(tokens, int):
        raise _unusable(path, f"{name} of the shape {shape}")
    return heads, size


def _unusable(path: Path, what: str) -> BundleError:
    return BundleError(
        f"{path} is no graph with growing keys and values: it has {what}",
        remedy="Export the model again.",
    )
