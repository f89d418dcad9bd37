"""Checkpoint to ONNX bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.onnx.attention import pays_to_stack
from edge_spec.exporters.onnx.emitter import (
    EMBEDDING_BLOCK,
    Emitter,
    FloatWeights,
    IntegerWeights,
)
from edge_spec.exporters.onnx.graph import ENCODER_FILE, PARTIAL_FILE, EncoderBuilder, GraphBuilder
from edge_spec.exporters.onnx.nodes import DATA_FILE, Initializers
from edge_spec.exporters.parity import against_reference
from edge_spec.exporters.requests import (
    BLOCK_SIZES,
    BlockQuantization,
    chosen_block_size,
    chosen_quantization,
    describe,
    head_problem,
    is_composed,
    report_bundle,
    require_replaceable,
)
from edge_spec.storage.atomic import atomic_directory

GRAPH_FILE = "model.onnx"


QUANTIZATIONS = {
    "int4": BlockQuantization(4, 1.0),
    "int8": BlockQuantization(8, 0.02),
    "fp16": BlockQuantization(16, 1e-3),
    "fp32": BlockQuantization(32, 1e-4),
}


class OnnxExporter:
    format = "onnx"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        experts = checkpoint.config.experts if is_composed(checkpoint.config) else None
        problem = head_problem(checkpoint.config)
        if experts and (experts.sigmoid or experts.choice_bias or experts.biases):
            problem = "experts with sigmoids or biases are not written for their activation"
        if problem is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {problem}",
                remedy="Run it with --runtime llamacpp or reference.",
            )

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes a bundle at `out` and compares it with the reference."""
        out = out.absolute()  # "." has neither a name nor a parent
        name, block_size = _checked(checkpoint, out, options)
        quantization = QUANTIZATIONS[name]
        checkpoint = first_layers(checkpoint, options.num_layers)
        with atomic_directory(out) as work:
            with (work / DATA_FILE).open("wb") as data:
                weights = Initializers(data)
                _write_graph(checkpoint, weights, work, quantization, block_size, progress)
            bound = quantization.max_kl_divergence
            compared = against_reference(checkpoint, "ort", bound, progress)
            describe(
                work,
                checkpoint,
                checkpoint.config,
                format=self.format,
                quantization=name if quantization.bits > 8 else f"{name} block {block_size}",
                check=compared if options.check else None,
                kv_cache="whole" if pays_to_stack(checkpoint.config) else "shared",
            )
        return report_bundle(out)


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> tuple[str, int]:
    options.require_only(OnnxExporter.format)
    name, block_size = chosen_quantization(options, QUANTIZATIONS), chosen_block_size(options)
    require_replaceable(out)
    if QUANTIZATIONS[name].bits <= 8:
        _require_whole_blocks(checkpoint, block_size)
    OnnxExporter().require_exportable(checkpoint)
    return name, block_size


def _require_whole_blocks(checkpoint: StoredCheckpoint, block_size: int) -> None:
    """Raises UnsupportedModelError for rows of tables and experts that end within a block; whatever
    else is in blocks is padded."""
    config, own = checkpoint.config, checkpoint.config.layer_embeddings
    rows = {"a hidden size": config.hidden_size}
    if own is not None:
        rows["its layers' embeddings"] = own.size * config.num_layers
    for what, size in rows.items():
        if size % EMBEDDING_BLOCK:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {what} of {size} cannot be quantized in blocks of "
                f"{EMBEDDING_BLOCK}",
                remedy="Export it with --quant fp16 or fp32.",
            )
    is_one_operator = config.experts is not None and not is_composed(config)
    sizes = (config.hidden_size, config.intermediate_size)
    if is_one_operator and any(size % block_size for size in sizes):
        smaller = [each for each in BLOCK_SIZES if not any(size % each for size in sizes)]
        smallest = f"--block-size {smaller[0]}, or with " if smaller else ""
        raise UnsupportedModelError(
            f"{checkpoint.path}: experts of {sizes[0]} x {sizes[1]} cannot be quantized in blocks "
            f"of {block_size}",
            remedy=f"Export it with {smallest}--quant fp16 or fp32.",
        )


def _write_graph(
    checkpoint: StoredCheckpoint,
    weights: Initializers,
    work: Path,
    quantization: BlockQuantization,
    block_size: int,
    progress: Progress,
) -> None:
    graph = _with_matrices(GraphBuilder(weights, checkpoint), quantization, block_size)

    def written(layer: int) -> None:
        checkpoint.release_pages()
        progress("Converting the weights", (layer + 1) / checkpoint.config.num_layers)

    model = graph.build(written)
    (work / GRAPH_FILE).write_bytes(model.SerializeToString())
    if checkpoint.config.encoder is not None:
        encoder = _with_matrices(EncoderBuilder(weights, checkpoint), quantization, block_size)
        (work / ENCODER_FILE).write_bytes(encoder.build_encoder().SerializeToString())
        return  # no part of it drafts
    (work / PARTIAL_FILE).write_bytes(graph.partial().SerializeToString())


_Graph = TypeVar("_Graph", bound=Emitter)


def _with_matrices(graph: _Graph, quantization: BlockQuantization, block_size: int) -> _Graph:
    if quantization.bits <= 8:
        graph.matrices = IntegerWeights(graph.checkpoint, graph, quantization.bits, block_size)
    else:
        kind = np.float16 if quantization.bits == 16 else np.float32
        graph.matrices = FloatWeights(graph.checkpoint, graph, kind)
    return graph
