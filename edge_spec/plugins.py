"""Finds runtimes, exporters, drafters and apps by entry point: the only dynamic importer.

A package adds one by declaring it, without touching this repository:

    [project.entry-points."edge_spec.drafters"]
    mine = "my_package:make_drafter"
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_spec.drafters.protocol import Drafter
from edge_spec.drafters.setting import Setting
from edge_spec.errors import MissingDependencyError, UnknownArchitectureError, UsageError
from edge_spec.model import Checkpoint, Exporter, Published, ReadingExporter, Runtime

AUTO_RUNTIMES = (("ort", "onnxruntime"), ("llamacpp", "llama_cpp"), ("ik", "ik_llama_cpp"))
BUNDLE_RUNTIMES = (("coreml", "coremltools"),)  # of one system alone: never a first choice
AUTO_DRAFTERS = ("suffix",)
PAIR_DRAFTERS = ("draft-model", "cascade")  # that a second model makes possible
SELF_DRAFTERS = ("early-exit", "layer-skip")  # that are a part of their target
COSTLY_DRAFTERS = PAIR_DRAFTERS + SELF_DRAFTERS
LIBRARIES = {  # the distributions of a runtime's library, of which one is installed
    "ort": ("onnxruntime", "onnxruntime-gpu"),
    "llamacpp": ("llama-cpp-python",),
    "ik": ("ik-llama-cpp-python",),
    "coreml": ("coremltools",),
    "mil": ("coremltools",),
}
WRITERS = {"onnx": "onnx", "gguf": "gguf", "coreml": "coremltools"}  # an exporter's distribution
OTHER_ARCHITECTURES = {"onnx": "optimum"}  # who writes a format for models its own does not know
# That bring a plugin's library; else "cpu".
EXTRAS = {
    "llamacpp": "llamacpp",
    "ik": "ik",
    "coreml": "coreml",
    "mil": "coreml",
    "serve": "serve",
    "desktop": "desktop",
}


def names(kind: str) -> list[str]:
    """The installed "runtimes", "exporters", "drafters" or "apps"."""
    return sorted(set(entry_points(group=f"edge_spec.{kind}").names))


def load_runtime(name: str, formats: Container[str] | None = None) -> Runtime:
    """ "auto" is `auto_runtime`."""
    runtime: Runtime = _load("runtimes", auto_runtime(formats) if name == "auto" else name)()
    return runtime


def auto_runtime(formats: Container[str] | None = None) -> str:
    """The first of AUTO_RUNTIMES whose library is installed and that reads one of `formats`; None:
    all of them can be had. Where there is none, the first that only lacks one of the two.

    BUNDLE_RUNTIMES come last, for bundles that no other can read."""

    def reads_one(runtime: str) -> bool:
        return formats is None or load_runtime(runtime).reads in formats

    known = AUTO_RUNTIMES if formats is None else AUTO_RUNTIMES + BUNDLE_RUNTIMES
    installed = [runtime for runtime, module in known if find_spec(module)]
    for among in (installed, [runtime for runtime, _ in known]):
        for runtime in filter(reads_one, among):
            return runtime
    return next(iter(installed), AUTO_RUNTIMES[0][0])


def library_version(runtime: str) -> str:
    """Of the library that a runtime calls; for one that is not known here, the version of the
    package that brings the runtime. "" where neither is installed."""
    if runtime not in LIBRARIES:
        found = entry_points(group="edge_spec.runtimes", name=runtime)
        return next((point.dist.version for point in found if point.dist is not None), "")
    for distribution in LIBRARIES[runtime]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def load_exporter(name: str) -> Exporter:
    exporter: Exporter = _load("exporters", name)()
    return exporter


def writer_versions(formats: Iterable[str]) -> dict[str, str]:
    """Of edge-spec and of the libraries that these exporters write with, by distribution."""
    found = {}
    for distribution in ("edge-spec", *(WRITERS[name] for name in formats if name in WRITERS)):
        with suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    return found


def open_exportable(exporter: Exporter, path: Path) -> Any:
    """A model as `exporter` reads it."""
    if isinstance(exporter, ReadingExporter):
        return exporter.open_source(path)
    return open_checkpoint(path)


def exporter_for(format: str, path: Path) -> tuple[Exporter, Any]:
    """Who writes the model at `path` in this format, and the model as it reads it.

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


def load_drafters(chosen: str, setting: Setting) -> list[Drafter]:
    """New drafters for "auto", "none", or names joined by commas.

    "auto" is a cascade with the draft where there is one, else AUTO_DRAFTERS, and the corpora where
    there are any.
    Raises UsageError for a name that is not installed or that the setting lacks something for.
    """
    if chosen == "none":
        return []
    wanted = [name.strip() for name in chosen.split(",")]
    if chosen == "auto":
        wanted = ["cascade"] if setting.drafts else list(AUTO_DRAFTERS)
        wanted += ["corpus"] if setting.corpora else []
    if len(set(wanted)) < len(wanted):
        raise UsageError(f"{chosen} names a drafter twice", remedy="Name each once.")
    makers: list[Callable[[Setting], Drafter]] = [_load("drafters", name) for name in wanted]
    return [make(setting) for make in makers]


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = _load("apps", name)
    return app


def open_checkpoint(path: Path) -> Checkpoint:
    """A published model that can be converted, by the reader that exporters provide."""
    checkpoint: Checkpoint = _load("checkpoints", "default")(path)
    return checkpoint


def open_published(path: Path) -> Published:
    """A GGUF file of any architecture, checked as far as it is known."""
    published: Published = _load("checkpoints", "gguf")(path)
    return published


def _load(kind: str, name: str) -> Any:
    found = entry_points(group=f"edge_spec.{kind}", name=name)
    if not found:
        raise UsageError(
            f"there is no {kind.removesuffix('s')} called {name!r}",
            remedy=f"Installed: {', '.join(names(kind)) or 'none'}.",
        )
    try:
        return next(iter(found)).load()
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind.removesuffix('s')} {name!r} needs a library that is not installed: {error}",
            remedy=f'Run: pip install "edge-spec[{EXTRAS.get(name, "cpu")}]".',
        ) from error
