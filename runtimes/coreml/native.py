"""Core ML through coremltools; outside macOS, packages can only be read."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.errors import (
    BundleError,
    DeviceError,
    SessionError,
    UsageError,
    install,
)
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, GPU, NPU, Device
from edge_spec.models.kept import compiled_bundle
from edge_spec.runtimes.libraries import import_library, pick_device
from edge_spec.runtimes.static.session import (
    EXPORT_AGAIN,
    Layout,
    Shape,
    Signature,
    StaticModel,
    config_of,
    read_layout,
)

_MIN_MACOS = 15  # for states and multifunction packages


def import_coremltools() -> Any:
    """Raises MissingDependencyError."""
    return import_library("coremltools", "models", f"{install('coreml')}.")


def this_system() -> tuple[str, str]:
    """Return sys.platform and the macOS version, "" elsewhere."""
    return sys.platform, platform.mac_ver()[0]


def require_core_ml() -> None:
    """Raises DeviceError if Core ML cannot run here."""
    system, macos = this_system()
    remedy = "Here, --runtime ort or llamacpp runs the model as it was published."
    if system != "darwin":
        raise DeviceError(f"Core ML runs on macOS {_MIN_MACOS} or newer only", remedy=remedy)
    if int(macos.partition(".")[0]) < _MIN_MACOS:
        raise DeviceError(
            f"this is macOS {macos}, and Core ML runs models with a state on {_MIN_MACOS} or newer",
            remedy=f"Update macOS. {remedy}",
        )


ANE, ALL = "ane", "all"
UNITS: Mapping[str, str] = {CPU: "CPU_ONLY", GPU: "CPU_AND_GPU", ANE: "CPU_AND_NE", ALL: "ALL"}
# coremltools' device classes.
CLASSES: Mapping[str, str] = {
    "MLCPUComputeDevice": CPU,
    "MLGPUComputeDevice": GPU,
    "MLNeuralEngineComputeDevice": ANE,
}


PACKAGE = "model.mlpackage"
FORMAT = "coreml"
_COMPUTE = "edge_spec.compute"
_MAX_MANIFEST_BYTES = 1_000_000
_SHOWN = 200


def package_of(bundle: Bundle) -> Path:
    """Raises UsageError for another format, BundleError for an incomplete package."""
    if bundle.manifest.format != FORMAT:
        raise UsageError(
            f"{bundle.path} is a bundle of format {bundle.manifest.format}, not {FORMAT}",
            remedy="Choose another --runtime, or export the model with --format coreml.",
        )
    # Every package has this file.
    package = bundle.file(f"{PACKAGE}/Manifest.json").parent
    listed = [name.removeprefix(f"{PACKAGE}/Data/") for name in bundle.manifest.files]
    for path in _listed_paths(package):
        if not any(name == path or name.startswith(f"{path}/") for name in listed):
            raise _damaged(package, f"it names {path[:_SHOWN]!r}, which the bundle does not have")
    return package


def _listed_paths(package: Path) -> list[str]:
    """Return the paths of a package's parts below Data. Raises BundleError."""
    try:
        with (package / "Manifest.json").open("rb") as file:
            entries = json.loads(file.read(_MAX_MANIFEST_BYTES))["itemInfoEntries"]
        return [str(entry["path"]) for entry in entries.values()]
    except (OSError, ValueError, AttributeError, KeyError, RecursionError, TypeError) as error:
        raise _damaged(package, f"its Manifest.json is not valid: {error!r:.{_SHOWN}}") from None


def read_specification(package: Path) -> Any:
    """Return a package's protocol buffer. Raises BundleError if it is damaged."""
    coremltools = import_coremltools()
    try:
        specification = coremltools.models.utils.load_spec(str(package))
    except Exception as error:  # the package reader's or protobuf's
        raise _damaged(package, error) from error
    if specification.WhichOneof("Type") != "mlProgram":
        raise _damaged(package, "it holds no ML program")
    return specification


def compute_of(specification: Any) -> str | None:
    """Return the unit that the package was laid out for, if known."""
    return specification.description.metadata.userDefined.get(_COMPUTE) or None


def signatures_of_spec(spec: Any) -> dict[str, Signature]:
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


_DESCRIPTIONS = {CPU: "the processor", GPU: "the GPU", ANE: "the Neural Engine"}
_COMPILED = "model.mlmodelc"
_T = TypeVar("_T")


class NativeProgram:
    """A compiled package on some units. Functions load when first run and share the state that the
    first one's model makes."""

    def __init__(self, compiled: Path, functions: Sequence[str], unit: str) -> None:
        self._compiled = compiled
        self._first = functions[0]
        self._unit = unit
        self._models: dict[str, Any] = {}
        self._lock = Lock()  # sessions may run in threads

    def make_state(self) -> Any:
        return _tried("make a state", self._model(self._first).make_state)

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: Any
    ) -> Mapping[str, np.ndarray]:
        model = self._model(function)
        # Copy the inputs: coremltools replaces float16 ones.
        found: Mapping[str, np.ndarray] = _tried(
            f"run {function}", lambda: model.predict(dict(inputs), state)
        )
        return found

    def read_state(self, state: Any, name: str) -> np.ndarray:
        return np.asarray(_tried(f"read the state {name}", lambda: state.read_state(name)))

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None:
        _tried(f"write the state {name}", lambda: state.write_state(name, value))

    def _model(self, function: str) -> Any:
        with self._lock:
            if function not in self._models:
                self._models[function] = self._load(function)
            return self._models[function]

    def _load(self, function: str) -> Any:
        coremltools = import_coremltools()
        units = coremltools.ComputeUnit[UNITS[self._unit]]
        try:
            return coremltools.models.CompiledMLModel(str(self._compiled), units, function)
        except Exception as error:  # RuntimeError from Core ML; coremltools' own
            raise DeviceError(
                f"Core ML cannot load {function} of {self._compiled} on {self._unit}: {error}",
                remedy="Choose another --device, or export the model with another --compute.",
            ) from error


def compiled_package(bundle: Bundle) -> Path:
    """Return the compiled package, made once for this system. Core ML caches Neural Engine code by
    path, so the path stays. Raises BundleError."""

    def compile_into(work: Path) -> None:
        package = package_of(bundle)
        coremltools = import_coremltools()
        try:
            coremltools.models.utils.compile_model(str(package), str(work / _COMPILED))
        except Exception as error:  # RuntimeError from Core ML; coremltools' own
            raise BundleError(
                f"Core ML cannot compile {package}: {error}", remedy=EXPORT_AGAIN
            ) from error

    kept = compiled_bundle(bundle, "coreml", {"macos": this_system()[1]})
    return kept.get(compile_into) / _COMPILED


def compute_devices(runtime: str) -> list[Device]:
    """List this machine's devices as `--device` names them."""
    coremltools = import_coremltools()
    found = coremltools.models.MLModel.get_available_compute_devices()
    names = {CLASSES.get(type(device).__name__) for device in found}
    return [
        Device(runtime, name, NPU if name == ANE else name, description)
        for name, description in _DESCRIPTIONS.items()
        if name in names
    ]


def _tried(what: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as error:  # RuntimeError from Core ML; coremltools' own
        raise SessionError(
            f"Core ML failed to {what}: {error}",
            remedy="Try another --device.",
        ) from error


@dataclass(frozen=True)
class OpenedPackage:
    """What a package says about itself."""

    package: Path
    specification: Any  # coremltools' protocol buffer
    signatures: Mapping[str, Signature]
    layout: Layout

    @classmethod
    def of(cls, bundle: Bundle) -> OpenedPackage:
        package = package_of(bundle)
        specification = read_specification(package)
        signatures = signatures_of_spec(specification)
        layout = read_layout(signatures, bundle.config, str(package))
        return cls(package, specification, signatures, layout)

    @property
    def unit(self) -> str:
        """The unit that the package was laid out for, or the GPU."""
        return compute_of(self.specification) or GPU


class CoreMlRuntime(Runtime):
    name = "coreml"
    reads = FORMAT

    def open(self, source: Bundle, options: RuntimeOptions) -> StaticModel:
        """Raises DeviceError outside macOS, UsageError, BundleError."""
        # Core ML chooses threads itself; a draft model gets its target's options.
        options.require_only(self.name, "threads", "providers", "context_length")
        asked = pick_device(self.name, options.providers, UNITS)
        config = config_of(source, options)
        require_core_ml()
        opened = OpenedPackage.of(source)
        unit = asked or opened.unit
        program = NativeProgram(compiled_package(source), list(opened.signatures), unit)
        return StaticModel(program, opened.layout, config)

    def compute(self, providers: Sequence[str]) -> str | None:
        """Return the Neural Engine as the unit to lay a package out for if it was asked for, else
        None (the GPU)."""
        require_core_ml()
        return ANE if pick_device(self.name, providers, UNITS) == ANE else None

    def devices(self, options: RuntimeOptions) -> list[Device]:
        try:
            require_core_ml()
        except DeviceError as error:
            return [Device(self.name, None, None, "", fault=str(error))]
        return compute_devices(self.name)
