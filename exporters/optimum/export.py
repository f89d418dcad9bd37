"""Convert a causal Hugging Face model that optimum knows to an ONNX bundle."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.checkpoint import ModelText
from edge_spec.exporters.hf_source import (
    CONFIG,
    TOKENIZER_CONFIG,
    Files,
    text_fields,
    weight_files,
)
from edge_spec.exporters.optimum import tools
from edge_spec.exporters.parity import Parity, compare, parity_tokens, require_near, scores_by
from edge_spec.exporters.requests import (
    BlockQuantization,
    chosen_block_size,
    chosen_quantization,
    describe,
    report_bundle,
    require_replaceable,
)
from edge_spec.exporters.stored_tensor import damaged
from edge_spec.models.bundle import Bundle
from edge_spec.storage.atomic import atomic_directory, scratch_beside

LIBRARY = "optimum-onnx"
_TIMEOUT_S = 4 * 3600.0  # then it hangs
_MAX_REASON = 300  # characters
_REMEDY = "Use more bits (--quant int8 or fp32), another model, or --no-check."
# Bounds as in exporters/onnx.
QUANTIZATIONS = {
    "int4": BlockQuantization(4, 1.0),
    "int8": BlockQuantization(8, 0.02),
    "fp32": BlockQuantization(32, 1e-4),
}


@dataclass(frozen=True)
class OptimumSource(ModelText):
    """A directory that holds nothing which has to be executed to be read."""

    model_type: str


class OptimumExporter:
    format = "onnx"

    def open_source(self, path: Path) -> OptimumSource:
        """Raises MissingDependencyError, for a model that could be exported."""
        source = open_source(path)
        try:
            version(LIBRARY)
        except PackageNotFoundError:
            raise MissingDependencyError(
                f"{source.model_type} models are exported by optimum, which is not installed",
                remedy='Run: pip install "edge-spec[optimum]".',
            ) from None
        return source

    def export(
        self, source: OptimumSource, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out` and compare it with transformers.

        Raises UsageError for unknown options, ExportError where optimum fails, such as for an
        architecture that it does not know, or the graph scores otherwise than transformers do;
        then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        options.require_only("optimum")
        name, block_size = chosen_quantization(options, QUANTIZATIONS), chosen_block_size(options)
        if options.num_layers is not None:
            raise UsageError(
                "the optimum exporter cannot leave layers out", remedy="Leave --layers out."
            )
        require_replaceable(out)
        quantization = QUANTIZATIONS[name]

        def on_chunk(done: float) -> None:
            progress("Comparing with transformers", done)

        with scratch_beside(out) as scratch, atomic_directory(out) as work:
            written = _write_graph(source, scratch, work, quantization.bits, block_size, progress)

            def compared(bundle: Bundle) -> Parity:
                tokens, scores = written["tokens"], np.load(scratch / tools.SCORES_FILE, "r")
                found = scores_by("ort", bundle, tokens, on_chunk, (32, 1))
                parity = compare(scores, found, tokens)
                return require_near(source.path, parity, quantization.max_kl_divergence, _REMEDY)

            describe(
                work,
                source,
                ModelConfig.from_dict(written["config"]),
                format=self.format,
                quantization=name if name == "fp32" else f"{name} block {block_size}",
                check=compared if options.check else None,
                kv_cache="growing",
                notes=written["notes"],
            )
        return report_bundle(out)


def _write_graph(
    source: OptimumSource,
    scratch: Path,
    out: Path,
    bits: int,
    block_size: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return what `tools.write_graph` does, in a process of its own. Raises ExportError."""
    path = source.path
    progress("Exporting with optimum", 0.0)
    text = parity_tokens(path, source.tokenizer_json())
    (scratch / tools.TOKENS_FILE).write_text(json.dumps(text), encoding="ascii")
    arguments = map(str, (path, scratch, out, bits, block_size))
    try:
        return dict(isolated(tools.write_graph, *arguments, timeout_s=_TIMEOUT_S))
    except IsolatedError as error:
        raise ExportError(
            f"optimum cannot export {path}: {str(error)[:_MAX_REASON]}",
            remedy="Use a causal language model of an architecture that optimum exports; check its "
            "files and the versions of optimum's extra.",
        ) from error


def open_source(path: Path) -> OptimumSource:
    """Weights stay unread. Raises ModelFileError, UnsupportedModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(
            f"{path} is no directory, which is all that optimum exports",
            remedy="Give a Hugging Face directory with config.json and safetensors.",
        )
    files = Files(path)
    for name in (CONFIG, TOKENIZER_CONFIG):
        if files[name].get("auto_map"):
            raise UnsupportedModelError(
                f"{path / name} asks to run code of the model's own (auto_map)",
                remedy="Only architectures that transformers brings itself can be exported.",
            )
    values = files[CONFIG]
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise damaged(f"{path / 'config.json'}: model_type is {reprlib.repr(model_type)}")
    if values.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{path / 'config.json'} is of a model with an encoder and a decoder",
            remedy="Only models that write text token by token, without an encoder, can run.",
        )
    if "quantization_config" in values:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: the weights are quantized already",
            remedy="Export the model that they were quantized from.",
        )
    weight_files(path)
    return OptimumSource(path, model_type, **text_fields(files, values))
