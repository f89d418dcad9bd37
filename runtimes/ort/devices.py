"""The devices of onnxruntime's execution providers, built in or from packages of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from edge_spec.errors import DeviceError, MissingDependencyError, UsageError
from edge_spec.placement.devices import CPU, GPU, NPU

_SUFFIX = "executionprovider"
_AZURE = "AzureExecutionProvider"  # calls a service and takes no graph
# Packages with get_library_path() and get_ep_name().
_PLUGIN = re.compile(r"onnxruntime[-_.](ep[-_.].+|qnn)", re.IGNORECASE)
# Of providers that do not tell.
_KINDS: Mapping[str, str] = MappingProxyType(
    {"cpu": CPU, "dnnl": CPU, "xnnpack": CPU, "qnn": NPU, "vitisai": NPU}
    | dict.fromkeys(("cuda", "tensorrt", "nvtensorrtrtx", "dml", "webgpu", "migraphx"), GPU)
)
# Of the one that has a name for each set of units: their kind, and its MLComputeUnits.
_COREML = "coreml"
_COREML_UNITS: Mapping[str, tuple[str | None, str]] = MappingProxyType(
    {
        _COREML: (None, "ALL"),
        f"{_COREML}-ane": (NPU, "CPUAndNeuralEngine"),
        f"{_COREML}-gpu": (GPU, "CPUAndGPU"),
        f"{_COREML}-cpu": (CPU, "CPUOnly"),
    }
)
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


class ProviderChoice(NamedTuple):
    """What a name stands for."""

    name: str
    provider: str
    kind: str | None
    description: str
    device: Any  # OrtEpDevice; None: the provider's first
    options: Mapping[str, str] = _NO_OPTIONS  # of a provider that is built in

    @property
    def from_package(self) -> bool:
        return self.device is not None and "library_path" in self.device.ep_metadata


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependencyError(
            "onnxruntime is not installed",
            remedy='Run: pip install "edge-spec[cpu]" (or edge-spec[gpu] for CUDA).',
        ) from None
    return onnxruntime


def choose(onnxruntime: Any, wanted: Sequence[str]) -> list[ProviderChoice]:
    """Chooses providers for names such as "cuda" or "CUDAExecutionProvider"; no name stands for the
    CPU.

    Packages are loaded where a name is not built in. Raises UsageError that lists the devices, or
    for two sets of units of one provider.
    """
    names = [_short(name) for name in wanted or (CPU,)]
    known = choices(onnxruntime)
    if not set(names) <= set(known):
        load_packages()
        known = choices(onnxruntime)
    for name in names:
        if name not in known:
            raise UsageError(
                f"onnxruntime has no device {name!r} here",
                remedy=f"There are: {', '.join(sorted(known))}; edge-spec devices says more.",
            )
    chosen = [known[name] for name in dict.fromkeys(names)]
    units = [choice.name for choice in chosen if choice.options]
    if len(units) > 1:
        raise UsageError(
            f"onnxruntime has Core ML once in a session, not as {' and '.join(units)}",
            remedy="Name one of them; coreml is all units together.",
        )
    return chosen


def choices(onnxruntime: Any) -> dict[str, ProviderChoice]:
    """Lists the choices by name: the provider's, and the kind where it has devices of several."""
    found = []
    for provider in onnxruntime.get_available_providers():
        if provider == _AZURE:
            continue
        name = _short(provider)
        if name == _COREML:
            found += _coreml(provider)
            continue
        by_kind: dict[str, Any] = {}  # the first of each
        for device in onnxruntime.get_ep_devices():
            if device.ep_name == provider:
                by_kind.setdefault(device.device.type.name.lower(), device)
        if not by_kind:
            found.append(ProviderChoice(name, provider, _KINDS.get(name), provider, None))
        for kind, device in by_kind.items():
            own = name if len(by_kind) == 1 else f"{name}-{kind}"
            found.append(ProviderChoice(own, provider, kind, _description(device), device))
    return {choice.name: choice for choice in found}


@cache
def load_packages() -> Mapping[str, str]:
    """Registers the providers of installed packages, once; says why for those that fail.

    Raises MissingDependencyError.
    """
    onnxruntime = import_onnxruntime()
    faults = {}
    names = {distribution.metadata["Name"] or "" for distribution in distributions()}
    for package in filter(_PLUGIN.fullmatch, sorted(names)):
        try:
            plugin: Any = import_module(re.sub(r"[-.]", "_", package.lower()))
            provider = plugin.get_ep_name()
            onnxruntime.register_execution_provider_library(provider, plugin.get_library_path())
        except Exception as error:  # of the package, or onnxruntime's, which share no base class
            faults[package] = f"it does not load: {' '.join(str(error).split())}"
        else:
            if provider not in onnxruntime.get_available_providers():
                faults[package] = "it finds no device"
    return MappingProxyType(faults)


def add_providers(
    settings: Any, chosen: Sequence[ProviderChoice], compiled: Path | None = None
) -> list[str | tuple[str, dict[str, str]]] | None:
    """Adds them to the SessionOptions, where one is a package's; else what a session takes beside
    them.

    compiled: where Core ML keeps what it compiles; without it, it compiles at every load. It goes
    by a graph's path, so a directory is for one state of the files alone.
    Raises UsageError for providers that do not go together, DeviceError for one that is gone.
    """
    if not any(choice.from_package for choice in chosen):
        return [_entry(choice, compiled) for choice in chosen]
    for choice in chosen:
        if choice.device is None:
            raise UsageError(
                f"onnxruntime cannot use {choice.name} beside the devices of packages",
                remedy="Leave it out of --device.",
            )
        try:
            settings.add_provider_for_devices([choice.device], {})
        except Exception as error:
            raise _lost([choice.name], f": {error}") from error
    return None


def require_started(session: Any, chosen: Sequence[ProviderChoice]) -> None:
    """onnxruntime goes on without a provider that does not start. Raises DeviceError."""
    lost = [choice.name for choice in chosen if choice.provider not in session.get_providers()]
    if lost:
        raise _lost(lost, ", and would run on the CPU")


def _coreml(provider: str) -> list[ProviderChoice]:
    """https://onnxruntime.ai/docs/execution-providers/CoreML-ExecutionProvider.html"""
    return [
        ProviderChoice(
            name,
            provider,
            kind,
            f"{provider}, {units}",
            None,
            MappingProxyType({"ModelFormat": "MLProgram", "MLComputeUnits": units}),
        )
        for name, (kind, units) in _COREML_UNITS.items()
    ]


def _entry(choice: ProviderChoice, compiled: Path | None) -> str | tuple[str, dict[str, str]]:
    if not choice.options:
        return choice.provider
    options = dict(choice.options)
    if compiled is not None:
        compiled.mkdir(parents=True, exist_ok=True)
        options["ModelCacheDirectory"] = str(compiled)
    return choice.provider, options


def _lost(names: Sequence[str], why: str) -> DeviceError:
    return DeviceError(
        f"onnxruntime cannot start {', '.join(names)}{why}",
        remedy="Choose another --device; edge-spec devices says what works.",
    )


def _short(name: str) -> str:
    return name.lower().replace(_SUFFIX, "")


def _description(device: Any) -> str:
    data = {**device.device.metadata, **device.ep_metadata}
    told = data.get("FULL_DEVICE_NAME") or data.get("Description")
    return str(told or f"{device.device.vendor} {device.device.type.name}")
