"""Write a checkpoint as an ONNX bundle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.onnx.attention import pays_to_stack
from edge_spec.exporters.onnx.experts import is_composed
from edge_spec.exporters.onnx.graph import ENCODER_FILE, PARTIAL_FILE, EncoderBuilder, GraphBuilder
from edge_spec.exporters.onnx.nodes import DATA_FILE, Initializers
from edge_spec.exporters.parity import against_reference, scores_by
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    BlockQuantization,
    check_request,
    describe,
    report_bundle,
    require_whole_rows,
)
from edge_spec.storage.atomic import atomic_directory

GRAPH_FILE = "model.onnx"
QUANTIZATIONS = {
    "int4": BlockQuantization(4, 1.0),
    "int8": BlockQuantization(8, 0.02),
    "fp16": BlockQuantization(16, 1e-3),
    "fp32": BlockQuantization(32, 1e-4),
}
_ROTATED = 16  # elements; GroupQueryAttention rotates multiples of it


class OnnxExporter:
    format = "onnx"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        problem = _problem(checkpoint.config)
        if problem is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {problem}",
                remedy="Run it with --runtime llamacpp or reference.",
            )

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out` and compare it with the reference."""
        out = out.absolute()  # "." has no name and no parent
        name = check_request(self, checkpoint, out, options, QUANTIZATIONS)
        quantization = QUANTIZATIONS[name]
        if quantization.bits <= 8:
            _require_whole_blocks(checkpoint)
        checkpoint = first_layers(checkpoint, options.num_layers)
        with atomic_directory(out) as work:
            with (work / DATA_FILE).open("wb") as data:
                weights = Initializers(data)
                graph = GraphBuilder(weights, checkpoint).with_matrices(quantization.bits)
                models = {GRAPH_FILE: graph.build(checkpoint.on_layer(progress))}
                if checkpoint.config.encoder is None:
                    models[PARTIAL_FILE] = graph.partial()
                else:  # it does not draft
                    encoder = EncoderBuilder(weights, checkpoint)
                    encoder.with_matrices(quantization.bits)
                    models[ENCODER_FILE] = encoder.build_encoder()
            for file, model in models.items():
                (work / file).write_bytes(model.SerializeToString())
            bound = quantization.max_kl_divergence
            compared = against_reference(checkpoint, partial(scores_by, "ort"), bound, progress)
            describe(
                work,
                checkpoint,
                checkpoint.config,
                format=self.format,
                quantization=name if quantization.bits > 8 else f"{name} block {BLOCK_SIZE}",
                check=compared if options.check else None,
                kv_cache="whole" if pays_to_stack(checkpoint.config) else "shared",
            )
        return report_bundle(out)


def _problem(config: ModelConfig) -> str | None:
    """Return why onnxruntime cannot compute the model's attention or experts."""
    experts = config.experts if is_composed(config) else None
    if experts and (experts.sigmoid or experts.choice_bias or experts.biases):
        return "experts with sigmoids or biases are not written for their activation"
    for layer in config.attending:
        size, rotation = config.heads(layer).head_dim, config.rotation(config.kind(layer))
        if size % _ROTATED:
            return (
                f"onnxruntime needs a head size that is a multiple of {_ROTATED}, this model has "
                f"{size}"
            )
        if rotation is None or rotation.size == size:
            continue
        rotates = f"this model rotates {rotation.size} of the {size} elements of a head"
        if config.qk_norm_after_rope:
            return f"{rotates} before it normalizes them, which onnxruntime does not"
        if rotation.size % _ROTATED:
            return f"onnxruntime rotates multiples of {_ROTATED} elements, {rotates}"
    return None


def _require_whole_blocks(checkpoint: StoredCheckpoint) -> None:
    """Raises UnsupportedModelError for partial blocks in tables and experts; other matrices are
    padded."""
    config, own = checkpoint.config, checkpoint.config.layer_embeddings
    sizes = [config.hidden_size]
    if own is not None:
        sizes.append(own.size * config.num_layers)
    if config.experts is not None and not is_composed(config):
        sizes.append(config.intermediate_size)
    require_whole_rows(checkpoint.path, sizes, "Export it with --quant fp16 or fp32.")
