"""Checkpoint to a bundle whose functions are one binary for the NPU of one processor."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.exporters.onnx.nodes import DATA_FILE
from edge_spec.exporters.qnn.compiler import (
    SOCS,
    Binary,
    chosen_soc,
    compile_graphs,
    require_compiler,
    share_outside,
)
from edge_spec.exporters.qnn.htp_graph import write_htp_graph
from edge_spec.exporters.requests import chosen_quantization, require_replaceable
from edge_spec.models.bundle import (
    TOKENIZER,
    Bundle,
    CompiledFor,
    open_bundle,
    open_unhashed,
    write_manifest,
)
from edge_spec.models.bundle_files import list_files
from edge_spec.storage.atomic import atomic_directory

QUANTIZATIONS = ("int4", "int8", "fp16")
# A session of the NPU maps about 3.5 GB (llama.cpp, docs/backend/hexagon/developer.md, and
# ExecuTorch's Llama example, which splits models at 4 GB).
MAX_MAPPED_BYTES = 3_500_000_000
_ENDING = ".onnx"
_MADE_ANEW = {"files", "tokenizer_sha256", "format", "compiled"}  # of a static bundle's manifest


class QnnExporter:
    format = "qnn"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        StaticOnnxExporter().require_exportable(checkpoint)

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes the bundle `out` for the processor `options.compute`. What is compared with the
        reference is the static bundle that it is compiled from, on the CPU.

        Raises MissingDependencyError without QNN's compiler, UsageError for unknown options and
        where `out` must not be replaced, UnsupportedModelError for a model that it cannot write or
        that an NPU cannot map, ExportError where the compiler fails or leaves attention or matrices
        to the CPU; then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        require_compiler()
        soc = chosen_soc(options.compute)
        options.require_only(self.format, "compute", "context_length", "hidden_states")
        require_replaceable(out)
        asked = replace(
            options, compute=None, quantization=chosen_quantization(options, QUANTIZATIONS)
        )
        with atomic_directory(out) as work:
            scratch = work / "scratch"  # several times the weights: /tmp may be small
            scratch.mkdir()
            StaticOnnxExporter().export(checkpoint, scratch / "static", asked, progress)
            static = open_unhashed(scratch / "static")
            binary = _compile(static, scratch, work, soc, progress)
            shutil.copyfile(static.file(TOKENIZER), work / TOKENIZER)
            shutil.rmtree(scratch)
            _describe(static, work, soc, binary)
        bundle = open_bundle(out)
        return ExportReport(
            out, bundle.num_bytes, bundle.manifest.parity, _notes(bundle.num_bytes, soc, binary)
        )


def _compile(static: Bundle, scratch: Path, work: Path, soc: str, progress: Progress) -> Binary:
    """Raises UnsupportedModelError, before anything is compiled, and ExportError."""
    weights = static.file(DATA_FILE).stat().st_size
    if weights > MAX_MAPPED_BYTES:
        raise UnsupportedModelError(
            f"its weights are {weights / 1e9:.1f} GB, and an NPU of Qualcomm's maps about "
            f"{MAX_MAPPED_BYTES / 1e9:.1f} GB",
            remedy="Use fewer bits (--quant int4), or a smaller model.",
        )
    graphs = {}
    for path in sorted(static.path.glob(f"*{_ENDING}")):
        formed = scratch / path.name
        try:
            write_htp_graph(path, formed)
        except ValueError as error:
            raise UnsupportedModelError(
                f"HTP cannot multiply by its matrices: {error}", remedy="Export it as fp16."
            ) from None
        graphs[path.name.removesuffix(_ENDING)] = formed
    binary = compile_graphs(graphs, work, soc, progress)
    share_outside(work / path.name for path in graphs.values())
    return binary


def _describe(static: Bundle, work: Path, soc: str, binary: Binary) -> None:
    described = static.manifest.model_dump(exclude=_MADE_ANEW)
    compiled = CompiledFor(
        soc=soc,
        htp_arch=SOCS[soc].htp_arch,
        versions=binary.versions,
        shares_weights=True,
        outside=binary.outside,
    )
    write_manifest(
        work, list_files(work, work), **described, format=QnnExporter.format, compiled=compiled
    )


def _notes(num_bytes: int, soc: str, binary: Binary) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in binary.versions.items())
    lines = [f"compiled for {soc} (HTP v{SOCS[soc].htp_arch}) by {versions}; runs there alone"]
    for function, inside in binary.inside.items():
        left = ", ".join(f"{count} {name}" for name, count in binary.outside[function].items())
        lines.append(
            f"{function}: {inside} nodes in the binary, {left or 'none'} on the CPU; "
            f"{binary.seconds[function]:.1f} s"
        )
    return tuple(lines)
