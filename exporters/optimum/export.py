"""Any causal Hugging Face model to ONNX bundle, step by step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.errors import (
    EdgeSpecError,
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.optimum import tools
from edge_spec.exporters.optimum.source import OptimumSource, open_source
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
    require_replaceable,
)
from edge_spec.models.bundle import TOKENIZER, open_bundle, write_manifest
from edge_spec.storage.atomic import atomic_directory, scratch_directory

LIBRARY = "optimum-onnx"
_STEP_S = 4 * 3600.0  # then it hangs
_MAX_REASON = 300  # characters
_REMEDY = "Use another model, or --no-check."


# Bounds as in exporters/onnx.
QUANTIZATIONS = MappingProxyType(
    {
        "int4": BlockQuantization(4, 1.0),
        "int8": BlockQuantization(8, 0.02),
        "fp32": BlockQuantization(32, 1e-4),
    }
)


class _Step(NamedTuple):
    """One of onnxruntime's tools, applied to the graph before it."""

    done: str  # such as "fused"
    work: Callable[..., None]
    arguments: tuple[int, ...]
    quantization: str | None  # None: as before
    max_kl_divergence: float


class _Made(NamedTuple):
    """The graph that a step has written, and how far it is from the source."""

    directory: Path
    quantization: str
    parity: dict[str, float]


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
        name, block_size = _checked(out, options)
        with scratch_directory(out) as scratch:
            making = _Making(source, scratch, options.check, progress)
            making.write_graph()
            making.take(_fusion(making.config))
            if name != "fp32":
                making.take(_quantization(name, block_size))
            with atomic_directory(out) as work:
                making.finish(work)
        bundle = open_bundle(out)
        manifest = bundle.manifest
        return ExportReport(out, bundle.num_bytes, manifest.parity, manifest.notes)


class _Making:
    """Applies steps in a scratch directory; `kept` is the last good one."""

    def __init__(
        self, source: OptimumSource, scratch: Path, check: bool, progress: Progress
    ) -> None:
        self.config: dict[str, Any] = {}
        self._source = source
        self._scratch = scratch
        self._check = check
        self._progress = progress
        self._tokens: list[int] = []
        self._notes: list[str] = []
        self._tokenizer_json = source.read_tokenizer()
        self._kept = _Made(scratch / "exported", "fp32", {})

    def write_graph(self) -> None:
        """Raises UnsupportedModelError, ExportError."""
        path, directory = self._source.path, self._kept.directory
        self._progress("Exporting with optimum", 0.0)
        directory.mkdir()
        text = parity_tokens(path, self._tokenizer_json)
        (self._scratch / tools.TOKENS_FILE).write_text(json.dumps(text), encoding="ascii")
        try:
            written = isolated(
                tools.write_graph,
                *map(str, (path, self._scratch, directory)),
                timeout_s=_STEP_S,
            )
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
        self._kept = self._compared(self._kept, QUANTIZATIONS["fp32"].max_kl_divergence)

    def take(self, step: _Step) -> None:
        """Keeps what it makes, or notes why not."""
        self._progress(f"Trying onnxruntime's tools: {step.done}", 0.0)
        made = _Made(self._scratch / step.done, step.quantization or self._kept.quantization, {})
        arguments = map(str, (self._kept.directory, made.directory, *step.arguments))
        try:
            isolated(step.work, *arguments, timeout_s=_STEP_S)
            made = self._compared(made, step.max_kl_divergence)
        except (IsolatedError, EdgeSpecError) as error:
            reason = error.message if isinstance(error, EdgeSpecError) else str(error)
            self._notes.append(f"Not {step.done}: {reason[:_MAX_REASON]}.")
            return
        shutil.rmtree(self._kept.directory)
        self._kept = made

    def finish(self, work: Path) -> None:
        """Writes the bundle."""
        for name in (tools.GRAPH_FILE, tools.DATA_FILE):
            shutil.move(self._kept.directory / name, work / name)
        self._describe(self._kept, work)

    def _compared(self, made: _Made, max_kl_divergence: float) -> _Made:
        """Adds its parity, unless nothing is to be checked. Raises ExportError beyond the bound,
        BundleError where the runtime cannot run it."""
        if not self._check:
            return made
        self._describe(made, made.directory)
        scores = np.load(self._scratch / tools.SCORES_FILE, mmap_mode="r")
        bundle = open_bundle(made.directory)
        score, longest = scored_by("ort", bundle, (32, 1)), bundle.config.context_length
        converted = Converted(score, longest, max_kl_divergence, _REMEDY)
        parity = check_against(self._source.path, scores, self._tokens, converted, self._part)
        return made._replace(parity=parity._asdict())

    def _part(self, done: float) -> None:
        self._progress("Comparing with transformers", done)

    def _describe(self, made: _Made, directory: Path) -> None:
        (directory / TOKENIZER).write_text(self._tokenizer_json, encoding="utf-8")
        source = self._source
        write_manifest(
            directory,
            format=OptimumExporter.format,
            name=source.path.name,
            architecture=ModelConfig.from_dict(self.config).to_dict(),
            chat_template=source.chat_template,
            eos_ids=source.eos_ids,
            bos_id=source.bos_id,
            adds_bos=source.adds_bos,
            sampling=source.sampling.stated,
            quantization=made.quantization,
            source_sha256=None,
            parity=made.parity,
            kv_cache="growing",
            notes=self._notes,
        )


def _fusion(config: Mapping[str, Any]) -> _Step:
    bound = QUANTIZATIONS["fp32"].max_kl_divergence
    sizes = (config["num_heads"], config["hidden_size"], config["context_length"])
    return _Step("fused", tools.fuse, sizes, None, bound)


def _quantization(name: str, block_size: int) -> _Step:
    chosen = QUANTIZATIONS[name]
    stored = f"{name} block {block_size}"
    arguments = (chosen.bits, block_size)
    return _Step("quantized", tools.quantize, arguments, stored, chosen.max_kl_divergence)


def _checked(out: Path, options: ExportOptions) -> tuple[str, int]:
    options.require_only("optimum")
    name, block_size = chosen_quantization(options, QUANTIZATIONS), chosen_block_size(options)
    if options.num_layers is not None:
        raise UsageError(
            "the optimum exporter cannot leave layers out", remedy="Leave --layers out."
        )
    require_replaceable(out)
    return name, block_size
