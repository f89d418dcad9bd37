"""Find a format's runtimes and exporters."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edge_spec.core.config import ModelConfig
from edge_spec.core.entry_points import installed, load_plugin
from edge_spec.core.export import Exporter, LayerStream, Observe, ReadingExporter, StreamsLayers
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import Checkpoint, ModelInfo, TensorRows
from edge_spec.errors import MissingDependencyError, UnknownArchitectureError, UsageError

if TYPE_CHECKING:
    from edge_spec.core.heads import HeadMatrix, TrainedHead

# Order without measurements: with our kernels, llamacpp decodes the demo 1.4 to 1.7 times as fast
# as ort (Zen 5, AVX-512 VNNI), and its default form loses less of a checkpoint.
AUTO_RUNTIMES = (("llamacpp", "llama_cpp"), ("ort", "onnxruntime"))
# On few systems, so never a first choice.
BUNDLE_RUNTIMES = (("coreml", "coremltools"), ("coreai", "coreai"))
REFERENCE = "reference"  # reads what exporters read; computes in float32
LIBRARIES = {  # distributions of a runtime's library, one of which is installed
    "ort": ("onnxruntime", "onnxruntime-gpu"),
    "llamacpp": ("llama-cpp-python",),
    "coreai": ("coreai-core",),
    "coreml": ("coremltools",),
    "openvino": ("openvino",),
}
_OWN_BUILDS = {"llamacpp": "LLAMA_CPP_LIB_PATH"}  # environment variables
WRITERS = {  # distribution that an exporter writes with
    "onnx": "onnx",
    "onnx-static": "onnx",
    "gguf": "gguf",
    "coreai": "coreai-core",
    "coreml": "coremltools",
}
OTHER_ARCHITECTURES = {"onnx": "optimum"}  # exporter for models that the format's own does not know


def load_runtime(name: str) -> Runtime:
    """Load a runtime. Raises UsageError for other classes, and as `load_plugin` does."""
    runtime = load_plugin("runtimes", name)()
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"the runtime {name} is of a class that does not inherit from Runtime",
            remedy="Have it inherit from edge_spec.core.model.Runtime.",
        )
    return runtime


def auto_runtime(formats: Container[str] | None = None) -> str:
    """Return the first of AUTO_RUNTIMES that is installed and reads one of `formats` (None: any),
    else the first that reads one, else the first that is installed. BUNDLE_RUNTIMES come last, for
    bundles that nothing else reads."""

    def reads_one(runtime: str) -> bool:
        return formats is None or any(each in formats for each in formats_of(load_runtime(runtime)))

    known = AUTO_RUNTIMES if formats is None else AUTO_RUNTIMES + BUNDLE_RUNTIMES
    installed = [runtime for runtime, module in known if find_spec(module)]
    for among in (installed, [runtime for runtime, _ in known]):
        for runtime in filter(reads_one, among):
            return runtime
    return next(iter(installed), AUTO_RUNTIMES[0][0])


def formats_of(runtime: Runtime) -> tuple[str, ...]:
    """Return what a runtime's `open` takes; models are converted to the first."""
    return (runtime.reads, *runtime.also_reads)


def format_for(runtime: Runtime, formats: Container[str] | None) -> str:
    """Return the first format that the runtime reads and the model has, else the one to convert
    to."""
    readable = (each for each in formats_of(runtime) if formats is not None and each in formats)
    return next(readable, runtime.reads)


def installed_runtimes() -> list[str]:
    """Return the installed ones of AUTO_RUNTIMES, in order."""
    return [runtime for runtime, module in AUTO_RUNTIMES if find_spec(module)]


def library_version(runtime: str) -> str:
    """Return a library's version, or that of an unknown runtime's package; "" if not installed."""
    if runtime not in LIBRARIES:
        point = installed("runtimes").get(runtime)
        return point.dist.version if point is not None and point.dist is not None else ""
    for name in LIBRARIES[runtime]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def library_build(runtime: str) -> str:
    """Return a digest of a library's files, since builds of a version may differ in kernels; "" if
    unknown."""
    for name in LIBRARIES.get(runtime, ()):
        with suppress(PackageNotFoundError):
            record = distribution(name).read_text("RECORD") or ""
            build = f"{record}{_own_build(runtime)}"
            return hashlib.sha256(build.encode()).hexdigest()[:16]
    return ""


def own_kernels(runtime: str) -> str:
    """Return the name of the kernels that replace the library's, or ""."""
    with suppress(MissingDependencyError):
        return load_runtime(runtime).kernels()
    return ""


def _own_build(runtime: str) -> str:
    """Identify a library that an environment variable puts in its place, or ""."""
    path = Path(os.environ.get(_OWN_BUILDS.get(runtime, ""), ""))
    if not path.name:
        return ""
    places = [path] if path.is_file() else sorted(path.glob("*llama*"))  # a file, or its directory
    return ",".join(f"{each}:{each.stat().st_size}:{each.stat().st_mtime_ns}" for each in places)


def load_layer_stream(
    source: TensorRows, sequences: Sequence[Sequence[int]], observe: Observe | None = None
) -> LayerStream:
    """See StreamsLayers; by the reference runtime, in float32."""
    runtime = load_runtime(REFERENCE)
    assert isinstance(runtime, StreamsLayers)
    return runtime.open_layers(source, sequences, observe)


def load_exporter(name: str) -> Exporter:
    exporter: Exporter = load_plugin("exporters", name)()
    return exporter


def writer_versions(formats: Iterable[str]) -> dict[str, str]:
    """Return versions of edge-spec and these exporters' libraries, by distribution."""
    found = {}
    for package in ("edge-spec", *(WRITERS[name] for name in formats if name in WRITERS)):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def open_exportable(exporter: Exporter, path: Path) -> Any:
    """Open a model as `exporter` reads it."""
    if isinstance(exporter, ReadingExporter):
        return exporter.open_source(path)
    return open_checkpoint(path)


def exporter_for(format: str, path: Path) -> tuple[Exporter, Any]:
    """Return the exporter that writes the model in this format, and the model as it reads it.
    Raises MissingDependencyError if only an exporter that is not installed knows it."""
    exporter = load_exporter(format)
    try:
        return exporter, open_exportable(exporter, path)
    except UnknownArchitectureError:
        if format not in OTHER_ARCHITECTURES:
            raise
    exporter = load_exporter(OTHER_ARCHITECTURES[format])
    return exporter, open_exportable(exporter, path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a published model for conversion, with the exporters' reader."""
    checkpoint: Checkpoint = load_plugin("checkpoints", "default")(path)
    return checkpoint


def is_head(path: Path, is_targets: bool = False) -> bool:
    """Return whether a trained head is here (`edge_spec.core.heads`). is_targets: it is the target
    itself, of which a part may be meant."""
    found: bool = load_plugin("checkpoints", "head").is_head(path, is_targets)
    return found


def says_head(config: Path) -> bool:
    """Return whether this config.json alone declares a trained head."""
    found: bool = load_plugin("checkpoints", "head").says_head(config)
    return found


def open_head(path: Path, target: ModelConfig, has_weights: bool = True) -> TrainedHead:
    """Open a trained head. has_weights: read weights. Raises ModelFileError, UnsupportedModelError,
    and UsageError for another target's head."""
    head: TrainedHead = load_plugin("checkpoints", "head").open_head(path, target, has_weights)
    return head


def step_graph(
    head: TrainedHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
) -> bytes:
    """Return a step's graph for `ComputesHeads`, and write its matrices to `weights`. bits: 4, 8 or
    FLOAT_BITS; output matrices have at least 8."""
    graph: bytes = load_plugin("checkpoints", "head").step_graph(head, matrices, bits, weights)
    return graph


def open_model_info(path: Path) -> ModelInfo:
    """Open a GGUF file of any architecture, checked as far as the architecture is known."""
    published: ModelInfo = load_plugin("checkpoints", "gguf")(path)
    return published
