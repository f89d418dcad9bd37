"""A graph that was loaded in segments (exporters/onnx/segments.py), used as one InferenceSession.

A pass runs the segments one after the other. What one makes for a later one, the streams, goes
through buffers that are bound once for passes of one width, as all others are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_spec.errors import BundleError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort.library import import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

SEGMENT_FILE = "segment.{}.onnx"  # from 0: the whole model in pieces, which load at the same time

_Values = Mapping[str, Any]  # of a signature, by name


def segment_files(bundle: Bundle) -> list[str]:
    """Returns the names of a bundle's segments, in their order; a small model has none."""
    return list(takewhile(bundle.manifest.files.__contains__, map(SEGMENT_FILE.format, count())))


class SegmentedInference:
    """Takes the place of an InferenceSession in all that this runtime calls of one.

    Raises BundleError for segments that do not follow each other.
    """

    def __init__(self, bundle: Bundle, segments: Sequence[onnxruntime.InferenceSession]) -> None:
        self.segments = segments
        self.inputs: list[_Values] = [_by_name(each.get_inputs()) for each in segments]
        self.outputs: list[_Values] = [_by_name(each.get_outputs()) for each in segments]
        self.streams = set(chain(*self.inputs)) & set(chain(*self.outputs))
        self.hidden_size = bundle.config.hidden_size
        if not self._are_chained():
            raise BundleError(
                f"{bundle.path}: its segments do not follow each other",
                remedy="Export the model again.",
            )

    def get_inputs(self) -> list[Any]:
        """Returns those of the whole graph."""
        return self._without_streams(self.inputs)

    def get_outputs(self) -> list[Any]:
        """Returns those of the whole graph."""
        return self._without_streams(self.outputs)

    def get_providers(self) -> list[str]:
        """Returns those of all segments."""
        return sorted({name for each in self.segments for name in each.get_providers()})

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """Returns those of all segments."""
        found = (each.get_provider_graph_assignment_info() for each in self.segments)
        return list(chain.from_iterable(found))

    def io_binding(self) -> SegmentedBinding:
        return SegmentedBinding(self)

    def run_with_iobinding(
        self, binding: SegmentedBinding, run_options: onnxruntime.RunOptions | None = None
    ) -> None:
        for segment, own in zip(self.segments, binding.bindings, strict=True):
            segment.run_with_iobinding(own, run_options)

    def _without_streams(self, signatures: Sequence[_Values]) -> list[Any]:
        joined = {name: value for each in signatures for name, value in each.items()}
        return [value for name, value in joined.items() if name not in self.streams]

    def _are_chained(self) -> bool:
        """Returns whether each stream is made before it is taken, and is as its buffer will be."""
        made: set[str] = set()
        for inputs, outputs in zip(self.inputs, self.outputs, strict=True):
            taken = {name: value for name, value in inputs.items() if name in self.streams}
            if not made.issuperset(taken):
                return False
            made.update(outputs)
            for value in taken.values():
                if value.type != "tensor(float)" or value.shape != [1, "rows", self.hidden_size]:
                    return False
        return True


class SegmentedBinding:
    """The bindings of all segments, used as one IOBinding."""

    def __init__(self, inference: SegmentedInference) -> None:
        self._inference = inference
        self.bindings = [each.io_binding() for each in inference.segments]

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Binds the streams, too, when the first array tells how many rows a pass has."""
        for binding in self._having(name, self._inference.inputs):
            binding.bind_cpu_input(name, array)
        if name == "input_ids":
            for stream in self._inference.streams:
                self._bind_stream(stream, array.shape[1])

    def bind_ortvalue_input(self, name: str, value: onnxruntime.OrtValue) -> None:
        for binding in self._having(name, self._inference.inputs):
            binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: onnxruntime.OrtValue) -> None:
        for binding in self._having(name, self._inference.outputs):
            binding.bind_ortvalue_output(name, value)

    def _having(self, name: str, signatures: Sequence[_Values]) -> Iterator[onnxruntime.IOBinding]:
        for binding, values in zip(self.bindings, signatures, strict=True):
            if name in values:
                yield binding

    def _bind_stream(self, name: str, rows: int) -> None:
        array = np.empty((1, rows, self._inference.hidden_size), np.float32)
        buffer = import_onnxruntime().OrtValue.ortvalue_from_numpy(array)
        self.bind_ortvalue_output(name, buffer)
        self.bind_ortvalue_input(name, buffer)


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    return {value.name: value for value in values}
