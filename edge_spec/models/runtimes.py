"""Finds the runtimes that read each format of a model, and the exporters that write it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edge_spec.core.config import ModelConfig
from edge_spec.core.entry_points import load_plugin
from edge_spec.core.export import Exporter, LayerStream, Observe, ReadingExporter, StreamsLayers
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import Checkpoint, ModelInfo, TensorRows
from edge_spec.errors import MissingDependencyError, UnknownArchitectureError, UsageError

if TYPE_CHECKING:
    from edge_spec.core.heads import HeadMatrix, TrainedHead

# The order in which they are asked where nothing is measured: with kernels of ours llamacpp decodes
# the demo 1.4 to 1.7 times as fast as ort does (Zen 5, AVX-512 VNNI), and a checkpoint loses less
# in its default form.
AUTO_RUNTIMES = (("llamacpp", "llama_cpp"), ("ort", "onnxruntime"))
# Of few systems: never a first choice.
BUNDLE_RUNTIMES = (("coreml", "coremltools"), ("coreai", "coreai"))
REFERENCE = "reference"  # reads what exporters read, and computes in float32
LIBRARIES = {  # the distributions of a runtime's library, of which one is installed
    "ort": ("onnxruntime", "onnxruntime-gpu"),
    "llamacpp": ("llama-cpp-python",),
    "coreai": ("coreai-core",),
    "coreml": ("coremltools",),
    "openvino": ("openvino",),
}
_OWN_BUILDS = {"llamacpp": "LLAMA_CPP_LIB_PATH"}  # variables
WRITERS = {  # an exporter's distribution
    "onnx": "onnx",
    "onnx-static": "onnx",
    "gguf": "gguf",
    "coreai": "coreai-core",
    "coreml": "coremltools",
}
OTHER_ARCHITECTURES = {"onnx": "optimum"}  # who writes a format for models its own does not know


def load_runtime(name: str) -> Runtime:
    """Raises UsageError for a class that is no runtime, and as `load_plugin` does."""
    runtime = load_plugin("runtimes", name)()
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"the runtime {name} is of a class that does not inherit from Runtime",
            remedy="Have it inherit from edge_spec.core.model.Runtime.",
        )
    return runtime


def auto_runtime(formats: Container[str] | None = None) -> str:
    """The first of AUTO_RUNTIMES whose library is installed and that reads one of `formats`; None:
    all of them can be had. Where there is none, the first that only lacks one of the two.

    BUNDLE_RUNTIMES come last, for bundles that no other can read."""

    def reads_one(runtime: str) -> bool:
        return formats is None or any(each in formats for each in formats_of(load_runtime(runtime)))

    known = AUTO_RUNTIMES if formats is None else AUTO_RUNTIMES + BUNDLE_RUNTIMES
    installed = [runtime for runtime, module in known if find_spec(module)]
    for among in (installed, [runtime for runtime, _ in known]):
        for runtime in filter(reads_one, among):
            return runtime
    return next(iter(installed), AUTO_RUNTIMES[0][0])


def formats_of(runtime: Runtime) -> tuple[str, ...]:
    """Returns all that a runtime's `open` takes; what is converted for it becomes the first."""
    return (runtime.reads, *runtime.also_reads)


def format_for(runtime: Runtime, formats: Container[str] | None) -> str:
    """Returns what a runtime is given of a model that there is in these formats; None, or none that
    it reads: the one that it converts to."""
    readable = (each for each in formats_of(runtime) if formats is not None and each in formats)
    return next(readable, runtime.reads)


def installed_runtimes() -> list[str]:
    """Returns those of AUTO_RUNTIMES whose library is installed, in their order."""
    return [runtime for runtime, module in AUTO_RUNTIMES if find_spec(module)]


def library_version(runtime: str) -> str:
    """Returns the version of the library that a runtime calls; for one that is not known here, the
    version of the package that brings the runtime. "" where neither is installed."""
    if runtime not in LIBRARIES:
        found = entry_points(group="edge_spec.runtimes", name=runtime)
        return next((point.dist.version for point in found if point.dist is not None), "")
    for name in LIBRARIES[runtime]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def library_build(runtime: str) -> str:
    """Returns what changes with the files of the library that a runtime calls: another build of one
    version may have other kernels. "" where it is not known."""
    for name in LIBRARIES.get(runtime, ()):
        with suppress(PackageNotFoundError):
            record = distribution(name).read_text("RECORD") or ""
            build = f"{record}{_own_build(runtime)}"
            return hashlib.sha256(build.encode()).hexdigest()[:16]
    return ""


def own_kernels(runtime: str) -> str:
    """Returns the name of the kernels that a runtime has put in the place of its library's own; ""
    where it has not."""
    with suppress(MissingDependencyError):
        return load_runtime(runtime).kernels()
    return ""


def _own_build(runtime: str) -> str:
    """Returns what changes with the library that an environment variable puts in the place of the
    one that was installed; "" if none does."""
    path = Path(os.environ.get(_OWN_BUILDS.get(runtime, ""), ""))
    if not path.name:
        return ""
    places = [path] if path.is_file() else sorted(path.glob("*llama*"))  # a file, or its directory
    return ",".join(f"{each}:{each.stat().st_size}:{each.stat().st_mtime_ns}" for each in places)


def load_layer_stream(
    source: TensorRows, sequences: Sequence[Sequence[int]], observe: Observe | None = None
) -> LayerStream:
    """See StreamsLayers: by the reference, which computes in float32."""
    runtime = load_runtime(REFERENCE)
    assert isinstance(runtime, StreamsLayers)
    return runtime.open_layers(source, sequences, observe)


def load_exporter(name: str) -> Exporter:
    exporter: Exporter = load_plugin("exporters", name)()
    return exporter


def writer_versions(formats: Iterable[str]) -> dict[str, str]:
    """Returns the versions of edge-spec and of the libraries that these exporters write with, by
    distribution."""
    found = {}
    for package in ("edge-spec", *(WRITERS[name] for name in formats if name in WRITERS)):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def open_exportable(exporter: Exporter, path: Path) -> Any:
    """A model as `exporter` reads it."""
    if isinstance(exporter, ReadingExporter):
        return exporter.open_source(path)
    return open_checkpoint(path)


def exporter_for(format: str, path: Path) -> tuple[Exporter, Any]:
    """Returns who writes the model at `path` in this format, and the model as the exporter reads
    it.

    Raises MissingDependencyError where only an exporter that is not installed knows it.
    """
    exporter = load_exporter(format)
    try:
        return exporter, open_exportable(exporter, path)
    except UnknownArchitectureError:
        if format not in OTHER_ARCHITECTURES:
            raise
    exporter = load_exporter(OTHER_ARCHITECTURES[format])
    return exporter, open_exportable(exporter, path)


def open_checkpoint(path: Path) -> Checkpoint:
    """A published model that can be converted, by the reader that exporters provide."""
    checkpoint: Checkpoint = load_plugin("checkpoints", "default")(path)
    return checkpoint


def is_head(path: Path, is_targets: bool = False) -> bool:
    """Says whether a trained head is here; see `edge_spec.core.heads`. is_targets: it is the target
    itself, of which only a part can be meant."""
    found: bool = load_plugin("checkpoints", "head").is_head(path, is_targets)
    return found


def says_head(config: Path) -> bool:
    """Says whether this config.json, by itself, is a trained head's."""
    found: bool = load_plugin("checkpoints", "head").says_head(config)
    return found


def open_head(path: Path, target: ModelConfig, has_weights: bool = True) -> TrainedHead:
    """has_weights: else they stay unread. Raises ModelFileError, UnsupportedModelError, and
    UsageError for another target's."""
    head: TrainedHead = load_plugin("checkpoints", "head").open_head(path, target, has_weights)
    return head


def step_graph(
    head: TrainedHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
) -> bytes:
    """A head's step as the runtimes that are ComputesHeads read it: a graph, whose matrices are
    written. bits: of them, 4 or 8, or FLOAT_BITS; output matrices have 8 at least."""
    graph: bytes = load_plugin("checkpoints", "head").step_graph(head, matrices, bits, weights)
    return graph


def open_model_info(path: Path) -> ModelInfo:
    """Opens a GGUF file of any architecture; what is known of that is checked."""
    published: ModelInfo = load_plugin("checkpoints", "gguf")(path)
    return published
