"""Checkpoint to a bundle of ONNX graphs whose shapes are fixed, for NPUs.

Rounds what matrices of a static graph are multiplied with to 16 bits, as NPUs compute.

Every input of a matrix has one scale and one zero point for all of it, fixed beforehand by the
texts that weights are measured on. QuantizeLinear and DequantizeLinear stand before the product,
of which a compiler may make one operation of integers (Nagel et al. 2021, A White Paper on Neural
Network Quantization). With 8 bits, a few large values of some columns leave the others no levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.exporters.alternatives import other_export
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.description import describe
from edge_spec.exporters.importance import input_importance, input_ranges
from edge_spec.exporters.onnx.nodes import DATA_FILE, Initializers, Nodes
from edge_spec.exporters.onnx.static_graph import StaticGraphs
from edge_spec.exporters.onnx.weights import (
    StaticFloats,
    StaticIntegers,
    StaticWeights,
)
from edge_spec.exporters.parity import Converted, Parity, check, scored_by
from edge_spec.exporters.requests import (
    BlockQuantization,
    chosen_quantization,
    require_plain,
    require_replaceable,
    require_unchanged,
)
from edge_spec.exporters.static_layout import (
    BLOCK_SIZE,
    StaticShape,
    chosen_context,
    functions,
    require_block_size,
    require_whole_blocks,
)
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.storage.atomic import atomic_directory

_HEADROOM = 1.0  # of a range, on either side: other texts have larger values, and 16 bits have room
_MOST = np.iinfo(np.uint16).max


class RoundedInputs:
    """Static weights whose inputs are rounded.

    ranges: the least and the largest value of each matrix's inputs, by its name.
    """

    def __init__(self, matrices: StaticWeights, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._matrices = matrices
        self._ranges = ranges
        self._last: tuple[Nodes, str] | None = None  # that was rounded

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        return self._matrices.linear(nodes, self._rounded(nodes, x, name), name)

    def embed(self, nodes: Nodes, ids: str) -> str:
        return self._matrices.embed(nodes, ids)

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        self._matrices.head(nodes, self._rounded(nodes, hidden, name), name, output)

    def _rounded(self, nodes: Nodes, x: str, name: str) -> str:
        """Matrices that have one input follow each other, and share its two nodes."""
        widened = f"{x}.rounded"
        if self._last == (nodes, x):
            return widened
        self._last = (nodes, x)
        scale, zero = affine(*self._ranges[name])
        add = nodes.weights.add
        told = [add(f"{x}.scale", scale), add(f"{x}.zero", zero)]
        levels = nodes.add("QuantizeLinear", [x, *told], f"{x}.levels")
        return nodes.add("DequantizeLinear", [levels, *told], widened)


def affine(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale, float32, and the zero point, uint16, both without axes, of levels that
    cover the range and 0."""
    room = _HEADROOM * max(high - low, float(np.finfo(np.float32).tiny))
    low, high = min(0.0, low - room), max(0.0, high + room)
    scale = np.float32((high - low) / _MOST)
    return np.array(scale), np.array(np.clip(np.rint(-low / scale), 0, _MOST), np.uint16)


QUANTIZATIONS: Mapping[str, BlockQuantization] = {
    "fp16": BlockQuantization(16, 5e-3),
    "int4": BlockQuantization(4, 1.5),
    "int8": BlockQuantization(8, 0.1),
    "w8a16": BlockQuantization(8, 0.1),
    "fp32": BlockQuantization(32, 1e-4),
}
_ROUNDS_INPUTS = "w8a16"


class StaticOnnxExporter:
    format = "onnx-static"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "static ONNX", other_export(checkpoint, "static"))

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes the bundle `out` and compares it with the reference.

        Raises UsageError for unknown options and where `out` must not be replaced,
        UnsupportedModelError for a model that it cannot write, ExportError beyond the
        quantization's bound; then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        name = _checked(checkpoint, out, options)
        if options.num_layers is not None:
            checkpoint = first_layers(checkpoint, options.num_layers)
        quantization = QUANTIZATIONS[name]
        shape = StaticShape.of(chosen_context(checkpoint.config, options.context_length))
        config = replace(checkpoint.config, context_length=shape.context_length)
        with atomic_directory(out) as work, require_unchanged(checkpoint.path):
            with (work / DATA_FILE).open("wb") as data:
                weights = Initializers(data)
                graphs = _graphs(checkpoint, weights, shape, name, options.hidden_states, progress)
                _write(graphs, work, progress)

            def compared(bundle: Bundle) -> Parity:
                bound, longest = quantization.max_kl_divergence, bundle.config.context_length
                converted = Converted(scored_by("ort", bundle), longest, bound, "Use more bits.")
                return check(checkpoint, converted, progress)

            describe(
                work,
                checkpoint,
                config,
                format=self.format,
                quantization=f"int4 block {BLOCK_SIZE}" if name == "int4" else name,
                check=compared if options.check else None,
            )
        bundle = open_bundle(out)
        return ExportReport(out, bundle.num_bytes, bundle.manifest.parity)


def _graphs(
    checkpoint: StoredCheckpoint,
    weights: Initializers,
    shape: StaticShape,
    quantization: str,
    hidden: bool,
    progress: Progress,
) -> StaticGraphs:
    state = np.float32 if quantization == "fp32" else np.float16
    matrices: StaticWeights
    if quantization in ("fp16", "fp32"):
        matrices = StaticFloats(checkpoint, weights, state)
    else:
        bits = QUANTIZATIONS[quantization].bits
        importance = input_importance(checkpoint, progress) if bits == 4 else {}
        matrices = StaticIntegers(checkpoint, weights, bits, importance)
        if quantization == _ROUNDS_INPUTS:
            matrices = RoundedInputs(matrices, input_ranges(checkpoint, progress))
    return StaticGraphs(checkpoint, weights, matrices, shape, state, hidden)


def _write(graphs: StaticGraphs, work: Path, progress: Progress) -> None:
    """The first function stores all weights, but for constants of a width."""

    def written(layer: int) -> None:
        graphs.checkpoint.release_pages()
        progress("Converting the weights", (layer + 1) / graphs.config.num_layers)

    first, *others = functions()
    for function in (first, *others):
        model = graphs.build(function, written if function is first else lambda layer: None)
        (work / f"{function.name}.onnx").write_bytes(model.SerializeToString())


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> str:
    options.require_only(StaticOnnxExporter.format, "context_length", "hidden_states")
    name = chosen_quantization(options, QUANTIZATIONS)
    require_block_size(options, "Static bundles")
    require_replaceable(out)
    StaticOnnxExporter().require_exportable(checkpoint)
    if name == "int4":
        require_whole_blocks(checkpoint, "Export it with --quant int8 or fp16.")
    return name
