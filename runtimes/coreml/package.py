"""Reads what a package on disk says of itself, without Core ML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.static.layout import EXPORT_AGAIN, Shape, Signature

PACKAGE = "model.mlpackage"
FORMAT = "coreml"
_COMPUTE = "edge_spec.compute"
_MAX_MANIFEST_BYTES = 1_000_000
_SHOWN = 200


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
    """Returns the package's protocol buffer. Raises BundleError for a damaged package."""
    coremltools = import_coremltools()
    try:
        specification = coremltools.models.utils.load_spec(str(package))
    except Exception as error:  # of the package reader, or protobuf's
        raise _damaged(package, error) from error
    if specification.WhichOneof("Type") != "mlProgram":
        raise _damaged(package, "it holds no ML program")
    return specification


def compute_of(specification: Any) -> str | None:
    """Returns the unit that the package was laid out for; None where it does not say."""
    return specification.description.metadata.userDefined.get(_COMPUTE) or None


def signatures_of_spec(spec: Any) -> dict[str, Signature]:
    """Reads the signatures of a package's specification, a protocol buffer."""
    described = spec.description
    functions = described.functions or [described]

    def shapes(features: Any) -> dict[str, Shape]:
        return {each.name: tuple(each.type.multiArrayType.shape) for each in features}

    return {
        getattr(function, "name", "") or "main": Signature(
            shapes(function.input),
            shapes(function.output),
            {each.name: tuple(each.type.stateType.arrayType.shape) for each in function.state},
        )
        for function in functions
    }


def _damaged(package: Path, why: object) -> BundleError:
    return BundleError(f"cannot read {package}: {why}", remedy=EXPORT_AGAIN)
