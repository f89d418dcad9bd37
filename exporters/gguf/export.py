"""Checkpoint to one GGUF file. Formats that choose a type for each tensor are written by
llama.cpp's own quantizer."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.constants import GGMLQuantizationType as Kind

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated, tell
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, MissingDependencyError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.gguf.vocabulary import tokenizer_metadata
from edge_spec.exporters.gguf.writer import (
    gguf_tensors,
    model_metadata,
    require_writable,
    stated_metadata,
    write_gguf,
)
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.exporters.gguf_reader import MAGIC
from edge_spec.exporters.parity import against_reference
from edge_spec.exporters.requests import (
    chosen_quantization,
    gguf_architecture,
    require_unchanged,
)
from edge_spec.storage.atomic import atomic_file, scratch_beside

# Of the types with about 4.5 bits, the one that loses least (docs/benchmarks.md); only the library
# writes it.
DEFAULT_QUANTIZATION = "Q4_K_M"
WITHOUT_LIBRARY = "Q4_0"
_REMEDY = "Use more bits (--quant Q8_0 or F16)."

# The ways to store the weights, and the farthest that each may be from the source, in nats: several
# times what the demo model measures (docs/benchmarks.md). They stop broken exports, not lossy ones.
QUANTIZATIONS = {
    "F32": 1e-3,
    "F16": 1e-3,
    "BF16": 5e-3,
    "Q8_0": 0.03,
    "Q5_1": 0.6,
    "Q5_0": 0.6,
    "Q4_1": 1.5,
    "Q4_0": 1.5,
    "Q6_K": 0.06,
    "Q5_K_M": 0.5,
    "Q5_K_S": 0.5,
    "Q4_K_M": 1.0,
    "Q4_K_S": 1.0,
    "Q3_K_L": 2.0,
    "Q3_K_M": 2.0,
    "Q3_K_S": 3.0,
    "Q2_K": 4.0,
}


def _types(name: str) -> tuple[LlamaFileType, Kind | None]:
    """Returns the type of a file, and of its matrices; None: llama.cpp chooses for each."""
    file_type = LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"]
    return file_type, None if "_K" in name else Kind[name]


class GgufExporter:
    format = "gguf"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_writable(checkpoint)

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes the file `out` and compares it with the reference.

        Raises UsageError for unknown options and where `out` must not be replaced,
        ModelFileError for a file that changes while it is read, ExportError beyond the
        quantization's bound; then, or when interrupted, `out` is left as it was.
        """
        out = out.absolute()
        name = _checked(checkpoint, out, options)
        file_type, kind = _types(name)
        checkpoint = first_layers(checkpoint, options.num_layers)
        stated = stated_metadata(checkpoint.path)
        metadata = model_metadata(checkpoint, file_type, stated)
        metadata |= tokenizer_metadata(checkpoint, stated)
        architecture = gguf_architecture(checkpoint.config)
        tensors = list(gguf_tensors(checkpoint, kind))
        parity: dict[str, float] = {}
        with atomic_file(out) as work, require_unchanged(checkpoint.path):
            if kind is not None:
                write_gguf(work, architecture, metadata, tensors, progress)
            else:
                with scratch_beside(out) as folder:
                    whole = folder / "whole.gguf"
                    write_gguf(whole, architecture, metadata, tensors, progress)
                    quantize(whole, work, file_type, progress)
            written = open_model_info(work)  # notices a file that is not complete
            if options.check:
                runtime, bound = (
                    "llamacpp" if find_spec(LIBRARY) else "reference",
                    QUANTIZATIONS[name],
                )
                compared = against_reference(checkpoint, runtime, bound, progress, _REMEDY)
                parity = compared(written)._asdict()
        return ExportReport(out, out.stat().st_size, parity)

    def requantize(self, source: Path, out: Path, quantization: str, progress: Progress) -> None:
        require_library(quantization)
        file_type, kind = _types(quantization)
        quantize(source, out, file_type, progress, outputs=kind)


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> str:
    """The quantization's name as the table spells it."""
    options.require_only(GgufExporter.format)
    usual = DEFAULT_QUANTIZATION if find_spec(LIBRARY) else WITHOUT_LIBRARY
    wanted = usual if options.quantization is None else options.quantization
    if wanted.upper() in QUANTIZATIONS:
        wanted = wanted.upper()
    name = chosen_quantization(replace(options, quantization=wanted), QUANTIZATIONS)
    if options.block_size is not None:
        raise UsageError("GGUF formats fix their block sizes", remedy="Leave --block-size out.")
    if not out.parent.is_dir():
        raise UsageError(
            f"there is no directory {out.parent}", remedy="Create it, or choose another place."
        )
    if out.is_dir():
        raise UsageError(f"{out} is a directory", remedy="Give the name of a file in it.")
    if out.exists() and not _may_replace(out):
        raise UsageError(f"{out} exists and is not a GGUF file", remedy="Choose another name.")
    if out.exists() and out.samefile(checkpoint.path):
        raise UsageError(f"{out} is the model itself", remedy="Choose another name.")
    if _types(name)[1] is None:
        require_library(name)
    return name


def _may_replace(out: Path) -> bool:
    """Returns whether `out` is a GGUF file or empty."""
    if not out.is_file():
        return False
    with out.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


LIBRARY = "llama_cpp"
_TIMEOUT_S = 24 * 3600.0
_COUNTER = re.compile(r"\[ *(\d+)/ *(\d+)\]")


def require_library(name: str) -> None:
    """Raises MissingDependencyError that names the quantization `name`."""
    if find_spec(LIBRARY) is None:
        raise MissingDependencyError(
            f"quantization {name} is made by llama-cpp-python, which is not installed",
            remedy='Run: pip install "edge-spec[llamacpp]", or export with --quant Q4_0.',
        )


def quantize(
    source: Path,
    target: Path,
    file_type: LlamaFileType,
    progress: Progress,
    outputs: GGMLQuantizationType | None = None,
) -> None:
    """Writes `target`; where a tensor of `source` has its type already, bit for bit. outputs: type
    of the output matrix; None: a better one than that of the others.

    In a process of its own: the library can be stopped in no other way, ends the process where
    one of its checks fails, and has one log callback for all of its users. Raises ExportError.
    """
    arguments = [str(source), str(target), str(int(file_type))]
    arguments += [] if outputs is None else [str(int(outputs))]
    try:
        isolated(
            run_library,
            *arguments,
            timeout_s=_TIMEOUT_S,
            on_step=lambda done: progress("Quantizing with llama.cpp", done),
        )
    except IsolatedError as error:
        raise ExportError(
            f"llama.cpp could not quantize the model: {error}",
            remedy="Export with --quant Q4_0 or Q8_0.",
        ) from None


def run_library(source: str, target: str, file_type: str, outputs: str = "") -> None:
    """Runs in the other process."""
    import ctypes
    import os

    import llama_cpp

    api: Any = llama_cpp
    last = ""

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def on_line(level: int, text: bytes | None, data: Any) -> None:
        nonlocal last
        last = (text or b"").decode("utf-8", "replace").strip() or last
        if counter := _COUNTER.match(last):
            tell(int(counter[1]) / int(counter[2]))

    api.llama_log_set(on_line, None)
    params = api.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.allow_requantize = True
    if outputs:
        params.output_tensor_type = int(outputs)
    status = api.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if status:
        raise RuntimeError(f"status {status}: {last}")
