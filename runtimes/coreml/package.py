"""A package on disk, read without Core ML: its specification, and its functions as programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.static.layout import EXPORT_AGAIN

PACKAGE = "model.mlpackage"
FORMAT = "coreml"
_COMPUTE = "edge_spec.compute"
_SPECIFICATION = 9  # the newest that is known here: iOS 18, macOS 15
_MAX_MANIFEST_BYTES = 1_000_000
_SHOWN = 200
_CONTENT = Path("Data", "com.apple.CoreML")


def package_of(bundle: Bundle) -> Path:
    """Raises UsageError for a bundle of another format, BundleError for one without a package."""
    if bundle.manifest.format != FORMAT:
        raise UsageError(
            f"{bundle.path} is a bundle of format {bundle.manifest.format}, not {FORMAT}",
            remedy="Choose another --runtime, or export the model with --format coreml.",
        )
    # The file that every package has, which the bundle has to list.
    package = bundle.file(f"{PACKAGE}/Manifest.json").parent
    listed = [name.removeprefix(f"{PACKAGE}/Data/") for name in bundle.manifest.files]
    for path in _listed_paths(package):
        if not any(name == path or name.startswith(f"{path}/") for name in listed):
            raise _damaged(package, f"it names {path[:_SHOWN]!r}, which the bundle does not have")
    return package


def _listed_paths(package: Path) -> list[str]:
    """Returns the paths of the parts of a package, below its Data. Raises BundleError."""
    try:
        with (package / "Manifest.json").open("rb") as file:
            entries = json.loads(file.read(_MAX_MANIFEST_BYTES))["itemInfoEntries"]
        return [str(entry["path"]) for entry in entries.values()]
    except (OSError, ValueError, AttributeError, KeyError, RecursionError, TypeError) as error:
        raise _damaged(package, f"its Manifest.json is not valid: {error!r:.{_SHOWN}}") from None


def read_specification(package: Path) -> Any:
    """The package's protocol buffer. Raises BundleError for a damaged package."""
    coremltools = import_coremltools()
    try:
        specification = coremltools.models.utils.load_spec(str(package))
    except Exception as error:  # of the package reader, or protobuf's
        raise _damaged(package, error) from error
    if specification.WhichOneof("Type") != "mlProgram":
        raise _damaged(package, "it holds no ML program")
    return specification


def compute_of(specification: Any) -> str | None:
    """The unit that the package was laid out for."""
    return specification.description.metadata.userDefined.get(_COMPUTE) or None


def read_function(package: Path, specification: Any, name: str) -> Any:
    """One function as pymil has it, with its weights. Raises BundleError for a damaged package."""
    from coremltools.converters.mil.frontend.milproto.load import load

    alone = type(specification)()
    alone.specificationVersion = specification.specificationVersion
    source = specification.mlProgram
    alone.mlProgram.version = source.version
    try:
        alone.mlProgram.functions[name].CopyFrom(source.functions[name])
        weights = str(package / _CONTENT / "weights")
        return load(alone, _SPECIFICATION, weights).functions[name]
    except Exception as error:  # coremltools raises whatever its checks happen to be
        raise _damaged(package, error) from error


def _damaged(package: Path, why: object) -> BundleError:
    return BundleError(f"cannot read {package}: {why}", remedy=EXPORT_AGAIN)
