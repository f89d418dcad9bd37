"""Converts any causal Hugging Face model to an ONNX bundle, step by step."""

from __future__ import annotations

import json
import reprlib
import shutil
from collections.abc import Callable
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
    EdgeSpecError,
    ExportError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.checkpoint import ModelText
from edge_spec.exporters.hf_source import (
    INDEX,
    SINGLE,
    damaged_file,
    read_json,
    shards,
    text_fields,
)
from edge_spec.exporters.optimum import tools
from edge_spec.exporters.parity import (
    Converted,
    check_against,
    parity_tokens,
    scored_by,
)
from edge_spec.exporters.requests import (
    BlockQuantization,
    chosen_block_size,
    chosen_quantization,
    manifest_fields,
    require_replaceable,
)
from edge_spec.models.bundle import TOKENIZER, open_bundle, write_manifest
from edge_spec.storage.atomic import atomic_directory, scratch_beside

LIBRARY = "optimum-onnx"
_STEP_S = 4 * 3600.0  # then it hangs
_MAX_REASON = 300  # characters
_PICKLES = ("*.bin", "*.pt", "*.pth")
_REMEDY = "Use another model, or --no-check."
# Bounds as in exporters/onnx.
QUANTIZATIONS = {
    "int4": BlockQuantization(4, 1.0),
    "int8": BlockQuantization(8, 0.02),
    "fp32": BlockQuantization(32, 1e-4),
}


@dataclass(frozen=True)
class OptimumSource(ModelText):
    """A directory that holds nothing which has to be executed to be read."""

    path: Path
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
        """Writes a bundle at `out`: the last step that is close enough to the source.

        Raises UsageError for unknown options, UnsupportedModelError for an architecture that
        optimum does not know, ExportError where not even the graph in float32 scores as
        transformers does; then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        options.require_only("optimum")
        name, block_size = chosen_quantization(options, QUANTIZATIONS), chosen_block_size(options)
        if options.num_layers is not None:
            raise UsageError(
                "the optimum exporter cannot leave layers out", remedy="Leave --layers out."
            )
        require_replaceable(out)
        with scratch_beside(out) as scratch:
            making = _Making(source, scratch, options.check, progress)
            making.write_graph()
            sizes = [making.config[key] for key in ("num_heads", "hidden_size", "context_length")]
            making.take("fused", tools.fuse, sizes, "fp32", "fp32")
            if name != "fp32":
                arguments = [QUANTIZATIONS[name].bits, block_size]
                stored = f"{name} block {block_size}"
                making.take("quantized", tools.quantize, arguments, name, stored)
            with atomic_directory(out) as work:
                for file in (tools.GRAPH_FILE, tools.DATA_FILE):
                    shutil.move(making.kept / file, work / file)
                making.describe(work)
        bundle = open_bundle(out)
        manifest = bundle.manifest
        return ExportReport(out, bundle.num_bytes, manifest.parity, manifest.notes)


class _Making:
    """Applies steps in a scratch directory; `kept` is that of the last good one."""

    def __init__(
        self, source: OptimumSource, scratch: Path, check: bool, progress: Progress
    ) -> None:
        self.config: dict[str, Any] = {}
        self.kept = scratch / "exported"
        self._source = source
        self._scratch = scratch
        self._check = check
        self._progress = progress
        self._tokens: list[int] = []
        self._notes: list[str] = []
        self._tokenizer_json = source.read_tokenizer()
        self._quantization = "fp32"  # of `kept`, and how far it is from the source
        self._parity: dict[str, float] = {}

    def write_graph(self) -> None:
        """Raises UnsupportedModelError, ExportError."""
        path = self._source.path
        self._progress("Exporting with optimum", 0.0)
        self.kept.mkdir()
        text = parity_tokens(path, self._tokenizer_json)
        (self._scratch / tools.TOKENS_FILE).write_text(json.dumps(text), encoding="ascii")
        arguments = map(str, (path, self._scratch, self.kept))
        try:
            written = isolated(tools.write_graph, *arguments, timeout_s=_STEP_S)
        except IsolatedError as error:
            raise ExportError(
                f"optimum cannot export {path}: {str(error)[:_MAX_REASON]}",
                remedy="Check the model's files and the versions of optimum's extra.",
            ) from error
        if "refused" in written:
            raise UnsupportedModelError(
                f"{path} cannot be exported: {written['refused']}",
                remedy="Use a causal language model of an architecture that optimum exports.",
            )
        self.config, self._tokens = written["config"], written["tokens"]
        self._notes = written["notes"]
        self._parity = self._compared(self.kept, QUANTIZATIONS["fp32"].max_kl_divergence)

    def take(
        self,
        done: str,
        work: Callable[..., None],
        arguments: list[int],
        quantization: str,
        stored: str,
    ) -> None:
        """Keeps what one of onnxruntime's tools makes of `kept`, or notes why not.

        done: such as "fused". quantization: of QUANTIZATIONS; stored: as a manifest states it.
        """
        self._progress(f"Trying onnxruntime's tools: {done}", 0.0)
        made, bound = self._scratch / done, QUANTIZATIONS[quantization].max_kl_divergence
        try:
            isolated(work, *map(str, (self.kept, made, *arguments)), timeout_s=_STEP_S)
            parity = self._compared(made, bound)
        except (IsolatedError, EdgeSpecError) as error:
            reason = error.message if isinstance(error, EdgeSpecError) else str(error)
            self._notes.append(f"Not {done}: {reason[:_MAX_REASON]}.")
            return
        shutil.rmtree(self.kept)
        self.kept, self._parity, self._quantization = made, parity, stored

    def describe(self, directory: Path) -> None:
        """Writes the tokenizer and the manifest beside a graph."""
        (directory / TOKENIZER).write_text(self._tokenizer_json, encoding="utf-8")
        source = self._source
        write_manifest(
            directory,
            format=OptimumExporter.format,
            **manifest_fields(source, source.path),
            architecture=ModelConfig.from_dict(self.config).to_dict(),
            quantization=self._quantization,
            parity=self._parity,
            kv_cache="growing",
            notes=self._notes,
        )

    def _compared(self, made: Path, max_kl_divergence: float) -> dict[str, float]:
        """Returns its parity, empty where nothing is to be checked. Raises ExportError beyond the
        bound, BundleError where the runtime cannot run it."""
        if not self._check:
            return {}
        self.describe(made)
        scores = np.load(self._scratch / tools.SCORES_FILE, mmap_mode="r")
        bundle = open_bundle(made)
        score, longest = scored_by("ort", bundle, (32, 1)), bundle.config.context_length
        converted = Converted(score, longest, max_kl_divergence, _REMEDY)
        parity = check_against(
            self._source.path,
            scores,
            self._tokens,
            converted,
            lambda done: self._progress("Comparing with transformers", done),
        )
        return parity._asdict()


def open_source(path: Path) -> OptimumSource:
    """Weights stay unread. Raises ModelFileError, UnsupportedModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(
            f"{path} is no directory, which is all that optimum exports",
            remedy="Give a Hugging Face directory with config.json and safetensors.",
        )
    values = read_json(path / "config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json", required=False)
    for name, content in (("config.json", values), ("tokenizer_config.json", tokenizer_config)):
        if content.get("auto_map"):
            raise UnsupportedModelError(
                f"{path / name} asks to run code of the model's own (auto_map)",
                remedy="Only architectures that transformers brings itself can be exported.",
            )
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise damaged_file(f"{path / 'config.json'}: model_type is {reprlib.repr(model_type)}")
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
    _require_safetensors(path)
    return OptimumSource(path, model_type, **text_fields(path, values))


def _require_safetensors(path: Path) -> None:
    names = shards(path) if (path / INDEX).exists() else [SINGLE]
    for name in names:
        if (path / name).is_file() and name.endswith(".safetensors"):
            continue
        if name == SINGLE and any(next(path.glob(kind), None) for kind in _PICKLES):
            raise UnsupportedModelError(
                f"{path} has its weights as a pickle, which can run code when it is read",
                remedy="Use the model's safetensors.",
            )
        raise ModelFileError(
            f"there is no safetensors file {path / name}", remedy="Download the model again."
        )
