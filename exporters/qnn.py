"""Compile a checkpoint to one binary for the NPU of one Qualcomm processor.

QNN's compiler runs in a separate process, because it may crash or hang. A binary that leaves
attention or matrices to the CPU is refused.

DequantizeLinear of weights would stay on the CPU and widen all weights in every pass, so
MatMulNBits multiplies by stored integers (4 and 8 bits, a scale per block of a power of two). The
NPU computes in float16, up to 65,504: squares of hidden states beyond 256 overflow, so norms are
one operator.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import external_data_helper

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated, tell
from edge_spec.core.model import Progress
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
    install,
)
from edge_spec.exporters.block_quantize import BlockQuantized, channels
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.emitter import output_of
from edge_spec.exporters.onnx.nodes import DATA_FILE
from edge_spec.exporters.onnx.static import StaticIntegers, StaticOnnxExporter
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    check_request,
    report_bundle,
    require_whole_blocks,
)
from edge_spec.models.bundle import (
    TOKENIZER,
    CompiledFor,
    list_files,
    open_bundle,
    write_manifest,
)
from edge_spec.storage.atomic import atomic_directory

QUANTIZATIONS = ("int4", "int8", "fp16")
# An NPU session maps about 3.5 GB (llama.cpp, docs/backend/hexagon/developer.md; ExecuTorch's Llama
# example splits models at 4 GB).
MAX_MAPPED_BYTES = 3_500_000_000
_MADE_ANEW = {"files", "tokenizer_sha256", "format", "compiled"}  # in the static bundle's manifest


class HtpIntegers(StaticIntegers):
    """Multiply by 4-bit blocks, and by 8-bit channels as blocks with the channel's scale."""

    def linear(self, x: str, names: Sequence[str], biases: Sequence[str]) -> str:
        (name,) = names
        return self._multiply(x, name, self._bits, output_of(name))

    def head(self, hidden: str, name: str, output: str) -> None:
        """HTP multiplies tensors of three axes; these rows have two."""
        nodes, (num_tokens, columns) = self._nodes, self._checkpoint.tensors[name].shape
        nodes.constant("batch_of_rows", [1, -1, columns])
        nodes.constant("rows_of_scores", [-1, num_tokens])
        inner = nodes.add("Reshape", [hidden, "batch_of_rows"], f"{output}.rows")
        product = self._multiply(inner, name, 8, f"{output}.batch")
        nodes.add("Reshape", [product, "rows_of_scores"], output)

    def _multiply(self, x: str, name: str, bits: int, output: str) -> str:
        make = self.quantized if bits == 4 else self._channel_blocks
        found = cache(lambda: make(name))  # at most once
        add = self._nodes.weights.add_made
        packed = add(f"{name}.blocks", lambda: found().packed)
        scales = add(f"{name}.block_scales", lambda: found().scales.reshape(-1))
        shape, inputs = self._checkpoint.tensors[name].shape, [x, packed, scales]
        return self._nodes.multiply_blocks(inputs, shape, bits, output, rounds_inputs=False)

    def _channel_blocks(self, name: str) -> BlockQuantized:
        levels, scales = channels(self._checkpoint.float32(name))
        rows, columns = levels.shape
        packed = (levels.view(np.uint8) ^ 0x80).reshape(rows, -1, BLOCK_SIZE)
        of_blocks = np.repeat(scales[:, None], columns // BLOCK_SIZE, axis=1)
        return BlockQuantized.symmetric(8, columns, packed, of_blocks)


class HtpGraphs(StaticOnnxExporter):
    """The static bundle that QNN compiles."""

    integers = HtpIntegers
    fuses_norms = True


class QnnExporter:
    format = "qnn"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        HtpGraphs().require_exportable(checkpoint)

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out` for `options.compute`; the parity check runs its static bundle on
        the CPU. Raises as `require_compiler` and `compile_graphs`, and UnsupportedModelError for a
        model too large to map."""
        out = out.absolute()
        require_compiler()
        soc = chosen_soc(options.compute)
        own_options = ("compute", "context_length", "hidden_states")
        name = check_request(self, checkpoint, out, options, QUANTIZATIONS, *own_options)
        if name != "fp16":
            require_whole_blocks(checkpoint, "Export it as fp16.")
        asked = replace(options, compute=None, quantization=name)
        with atomic_directory(out) as work:
            scratch = work / "scratch"  # several times the weights, which /tmp may not hold
            scratch.mkdir()
            HtpGraphs().export(checkpoint, scratch / "static", asked, progress)
            static = open_bundle(scratch / "static", hashed=False)
            num_bytes = static.file(DATA_FILE).stat().st_size
            if num_bytes > MAX_MAPPED_BYTES:
                raise UnsupportedModelError(
                    f"its weights are {num_bytes / 1e9:.1f} GB, and an NPU of Qualcomm's maps "
                    f"about {MAX_MAPPED_BYTES / 1e9:.1f} GB",
                    remedy="Use fewer bits (--quant int4), or a smaller model.",
                )
            graphs = {path.stem: path for path in sorted(static.path.glob("*.onnx"))}
            binary = compile_graphs(graphs, work, soc, progress)
            shutil.copyfile(static.file(TOKENIZER), work / TOKENIZER)
            shutil.rmtree(scratch)
            described = static.manifest.model_dump(exclude=_MADE_ANEW)
            files = list_files(work, work)
            write_manifest(work, files, **described, format=self.format, compiled=binary)
        versions = ", ".join(f"{name} {version}" for name, version in binary.versions.items())
        note = f"compiled for {soc} (HTP v{binary.htp_arch}) by {versions}; runs there alone"
        return report_bundle(out, (note,))


class Soc(NamedTuple):
    """model: QNN's number; htp_arch: the NPU's version."""

    model: int
    htp_arch: int


# NPUs from version 73 on: functions on older ones cannot share weights. QNN accepts any name and
# version silently, and compiles for another one.
SOCS: Mapping[str, Soc] = {
    "SM8550": Soc(43, 73),  # Snapdragon 8 Gen 2
    "SM8650": Soc(57, 75),  # 8 Gen 3
    "SM8750": Soc(69, 79),  # 8 Elite
    "SM8850": Soc(87, 81),  # 8 Elite Gen 5
    "SC8380XP": Soc(60, 73),  # Snapdragon X
    "SC8480XP": Soc(88, 81),  # X2
}


def chosen_soc(asked: str | None) -> str:
    """Raises UsageError for none or an unknown one."""
    known = ", ".join(SOCS)
    if asked is None:
        raise UsageError(
            "a binary for an NPU is for one processor, and none is named",
            remedy=f"Add --soc with one of {known}.",
        )
    name = asked.upper()
    if name not in SOCS:
        raise UsageError(f"unknown processor {asked!r}", remedy=f"Choose one of {known}.")
    return name


_ERROR = 3  # log severity in onnxruntime
BINARY_SUFFIX = "_qnn.bin"  # the provider names it after the first function
_ENTRIES = {
    "ep.context_enable": "1",
    "ep.context_embed_mode": "0",
    "ep.share_ep_contexts": "1",
    "session.record_ep_graph_assignment_info": "1",
}


def compile_all(request: str) -> dict[str, Any]:
    """Compile graphs into one binary: sessions share weights only within a process. Return the
    compilers' versions, and per function the number of nodes left to the CPU, by operator.

    request: JSON with `graphs` (function -> path), `out` (a directory), the provider's `options`.
    """
    import onnxruntime
    import onnxruntime_qnn as provider

    asked = loads(request)
    name = provider.get_ep_name()
    onnxruntime.register_execution_provider_library(name, provider.get_library_path())
    device = next(each for each in onnxruntime.get_ep_devices() if each.ep_name == name)
    options = {"backend_path": provider.get_qnn_htp_path(), **asked["options"]}
    graphs = asked["graphs"]
    sessions, left = [], {}
    for number, (function, path) in enumerate(graphs.items()):
        print(f"while it compiled {function}", file=sys.stderr, flush=True)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = _ERROR
        entries = {**_ENTRIES, "ep.context_file_path": str(Path(asked["out"]) / f"{function}.onnx")}
        if number + 1 == len(graphs):
            entries["ep.stop_share_ep_contexts"] = "1"
        for key, value in entries.items():
            settings.add_session_config_entry(key, value)
        settings.add_provider_for_devices([device], options)
        session = onnxruntime.InferenceSession(path, settings, enable_fallback=0)
        sessions.append(session)  # weights are shared with open sessions
        counted = Counter(
            node.op_type
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != name
            for node in part.get_nodes()
        )
        left[function] = dict(sorted(counted.items()))
        tell((number + 1) / len(graphs))
    versions = {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime-qnn": provider.__version__,
        "qnn": provider.build_and_package_info.qnn_version,
    }
    return {"versions": versions, "outside": left}


_TIMEOUT_S = 4 * 3600.0  # the head of a large vocabulary takes minutes per width
_SYSTEMS = ("linux", "win32")
# Operators that take most time, or widen all weights in every pass.
_HEAVY = ("DequantizeLinear", "Gemm", "MatMul", "MatMulNBits", "Softmax")


def require_compiler() -> None:
    """Raises MissingDependencyError if QNN's compiler is not installed or the system has none."""
    if sys.platform not in _SYSTEMS:
        raise MissingDependencyError(
            f"there is no compiler for Qualcomm's NPU on {platform.system()}",
            remedy="Export on Linux or Windows, with the extra qnn installed there.",
        )
    for module in ("onnxruntime", "onnxruntime_qnn"):
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"the compiler for Qualcomm's NPU needs {module}, which is not installed",
                remedy=install("qnn"),
            )


def compile_graphs(
    graphs: Mapping[str, Path],
    out: Path,
    soc: str,
    progress: Progress,
    work: Callable[[str], dict[str, Any]] = compile_all,
    timeout_s: float = _TIMEOUT_S,
) -> CompiledFor:
    """Write the graphs' binary, and a small graph per function, into `out`. Raises ExportError if
    the compiler fails, crashes, hangs, or leaves attention or matrices to the CPU."""
    chip = SOCS[soc]
    request = {
        "graphs": {function: str(path) for function, path in graphs.items()},
        "out": str(out),
        "options": {
            "soc_model": str(chip.model),
            "htp_arch": str(chip.htp_arch),
            "enable_htp_prepare_only": "1",
        },
    }
    what = f"Compiling for {soc}"
    progress(what, 0.0)
    try:
        found = isolated(
            work,
            dumps(request),
            timeout_s=timeout_s,
            on_step=lambda done: progress(what, done),
        )
    except IsolatedError as error:
        raise ExportError(
            f"QNN's compiler failed for {soc}: {error}",
            remedy="Try another --quant or --soc, or export without --compile.",
        ) from None
    for name, left in found["outside"].items():
        heavy = ", ".join(f"{left[kind]} {kind}" for kind in _HEAVY if kind in left)
        if heavy:
            raise ExportError(
                f"QNN's compiler leaves {heavy} of {name} to the CPU",
                remedy="Try another --quant, or export without --compile.",
            )
    written = [out / f"{name}.onnx" for name in graphs]
    if not all(map(Path.is_file, written)) or not any(out.glob(f"*{BINARY_SUFFIX}")):
        raise ExportError(
            "QNN's compiler ended without a binary", remedy="Export without --compile."
        )
    _share_outside(written)
    return CompiledFor(soc=soc, htp_arch=chip.htp_arch, shares_weights=True, **found)


_OUTSIDE_FILE = "outside.data"
_LEAST_BYTES = 1024  # smaller tensors stay in the graph


def _share_outside(graphs: Iterable[Path]) -> None:
    """Move large initializers of graphs in one directory into one file, equal ones once."""
    stored: dict[bytes, tuple[int, int]] = {}
    for path in graphs:
        model = onnx.load(path, load_external_data=False)
        data = path.parent / _OUTSIDE_FILE
        for tensor in model.graph.initializer:
            content = tensor.raw_data
            if len(content) < _LEAST_BYTES:
                continue
            if content not in stored:
                with data.open("ab") as file:
                    stored[content] = file.tell(), file.write(content)
            external_data_helper.set_external_data(tensor, data.name, *stored[content])
            tensor.ClearField("raw_data")
        path.write_bytes(model.SerializeToString())
