"""Devices of onnxruntime's execution providers, built in or from packages."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from edge_spec.errors import DeviceError, UsageError
from edge_spec.models.devices import CPU, GPU, NPU
from edge_spec.runtimes.ort.cuda import CudaDevice, cuda_driver, prepare_cuda, start_error
from edge_spec.runtimes.ort.library import import_onnxruntime

_SUFFIX = "executionprovider"
_PACKAGES = ("onnxruntime_ep_webgpu", "onnxruntime_qnn")  # get_library_path() and get_ep_name()
_CUDA = "cuda"
QNN = "qnn"
# Machines where the provider's HTP is an NPU; elsewhere it is an emulator and a compiler.
_ARM = ("aarch64", "arm64")
# Other providers compute draft trees' attention wrong, recompile the graph for each new pass shape,
# or have a runtime of their own. QNN's may only compile for NPUs.
_KINDS: Mapping[str, str] = {CPU: CPU, _CUDA: GPU, "webgpu": GPU, QNN: NPU}
# Their attention takes float16, not float32.
TAKES_HALF = frozenset({"CUDAExecutionProvider"})
_NO_OPTIONS: Mapping[str, str] = {}


class ProviderChoice(NamedTuple):
    """The provider and device behind a device name."""

    name: str
    provider: str
    kind: str | None
    description: str
    device: Any  # OrtEpDevice; None if a built-in provider lists none
    options: Mapping[str, str] = _NO_OPTIONS  # of a built-in provider
    cuda: CudaDevice | None = None

    @property
    def from_package(self) -> bool:
        return self.device is not None and "library_path" in self.device.ep_metadata


def choose(onnxruntime: Any, wanted: Sequence[str]) -> list[ProviderChoice]:
    """Return providers for names such as "cuda", "cuda:1" or "CUDAExecutionProvider"; none: the
    CPU's. Loads packages for unknown names. Raises UsageError."""
    names = [_short(name).removesuffix(":0") for name in wanted or (CPU,)]
    if names != [CPU]:
        prepare_cuda(onnxruntime)
    known = choices(onnxruntime, asks_driver=names != [CPU])
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
    _require_one_each(chosen)
    return chosen


def choices(onnxruntime: Any, asks_driver: bool = True) -> dict[str, ProviderChoice]:
    """Return the choices by name, numbered from a provider's second device ("cuda:1"). asks_driver:
    list CUDA devices, which starts their driver."""
    found: list[ProviderChoice] = []
    for provider in onnxruntime.get_available_providers():
        name = _short(provider)
        if name not in _KINDS or (name == QNN and not _has_htp()):
            continue
        told = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
        if told:
            found += _told_apart(name, provider, told)
        elif name == _CUDA and asks_driver:
            found += _cuda_devices(provider)
        else:
            found.append(ProviderChoice(name, provider, _KINDS[name], provider, None))
    return {choice.name: choice for choice in found}


@cache
def load_packages() -> Mapping[str, str]:
    """Register packages' providers once; return why some fail. Raises MissingDependencyError."""
    onnxruntime = import_onnxruntime()
    faults = {}
    for module in _PACKAGES:
        if find_spec(module) is None:
            continue
        package = module.replace("_", "-")
        try:
            plugin: Any = import_module(module)
            provider = plugin.get_ep_name()
            onnxruntime.register_execution_provider_library(provider, plugin.get_library_path())
        except Exception as error:  # the package's or onnxruntime's own
            faults[package] = f"it does not load: {' '.join(str(error).split())}"
        else:
            if provider not in onnxruntime.get_available_providers():
                faults[package] = "it finds no device"
            elif _short(provider) == QNN and not _has_htp():
                faults[package] = "no NPU of Qualcomm's is here: it compiles for others, no more"
    return MappingProxyType(faults)


def add_providers(
    settings: Any, chosen: Sequence[ProviderChoice]
) -> list[str | tuple[str, dict[str, str]]] | None:
    """Add packages' providers to the SessionOptions, or return built-in ones for the session.
    Raises UsageError for providers that cannot be combined, DeviceError."""
    if not any(choice.from_package for choice in chosen):
        return [
            (choice.provider, dict(choice.options)) if choice.options else choice.provider
            for choice in chosen
        ]
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


def start_session(
    graph: str | Path | bytes,
    settings: Any,
    chosen: Sequence[ProviderChoice],
    ask: Callable[[str], str | None] | None = None,
) -> Any:
    """Return an InferenceSession. Raises DeviceError if a device does not start, onnxruntime's
    errors, and those of `add_providers`. ask: see `require_started`."""
    providers = add_providers(settings, chosen)
    try:
        session = import_onnxruntime().InferenceSession(
            graph,
            settings,
            providers=providers,
            enable_fallback=0,  # or it prints the fault and falls back to the CPU
        )
    except Exception as error:  # onnxruntime's share no base class
        names = [choice.name for choice in chosen]
        known = None if set(names) == {CPU} else start_error(names, str(error))
        if known is None:
            raise
        raise known from error
    require_started(session, chosen, ask)
    return session


def require_started(
    session: Any, chosen: Sequence[ProviderChoice], ask: Callable[[str], str | None] | None = None
) -> None:
    """Raises DeviceError if onnxruntime goes on without a provider. ask: returns why a device does
    not start, which onnxruntime only logs."""
    lost = [choice.name for choice in chosen if choice.provider not in session.get_providers()]
    if lost:
        reason = ask(lost[0]) if ask else None
        raise _lost(lost, f": {reason.rstrip('.')}" if reason else ", and would run on the CPU")


def _has_htp() -> bool:
    """Return whether this may be a Qualcomm machine with an NPU."""
    return platform.machine().lower() in _ARM and sys.platform != "darwin"


def _require_one_each(chosen: Sequence[ProviderChoice]) -> None:
    """onnxruntime would ignore a built-in provider's second device."""
    for provider in {choice.provider for choice in chosen if choice.device is None}:
        names = [choice.name for choice in chosen if choice.provider == provider]
        if len(names) > 1:
            raise UsageError(
                f"onnxruntime has {provider} once in a session, not as {' and '.join(names)}",
                remedy="Name one of them.",
            )


def _told_apart(name: str, provider: str, told: Sequence[Any]) -> Iterator[ProviderChoice]:
    """Yield a choice for each OrtEpDevice, those of the provider's kind first."""
    kind = _KINDS[name]
    told = sorted(told, key=lambda device: device.device.type.name.lower() != kind)
    for number, device in enumerate(told):
        own = _numbered(name, number)
        yield ProviderChoice(own, provider, kind, _description(device), device)


def _cuda_devices(provider: str) -> list[ProviderChoice]:
    """Return the driver's devices, or just the provider, so that a start explains why there are
    none."""
    try:
        devices = cuda_driver().devices
    except DeviceError:
        return [ProviderChoice(_CUDA, provider, GPU, provider, None)]
    return [
        ProviderChoice(
            _numbered(_CUDA, number),
            provider,
            GPU,
            device.name,
            None,
            MappingProxyType({"device_id": str(number)} if number else {}),
            device,
        )
        for number, device in enumerate(devices)
    ]


def _numbered(name: str, number: int) -> str:
    return f"{name}:{number}" if number else name


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


RECORDS_PLACEMENT = "session.record_ep_graph_assignment_info"  # set to "1" before loading
_CPU_PROVIDER = "CPUExecutionProvider"
# Operators that take most time; shapes and lookups are not worth a copy.
_HEAVY = (
    "Attention",
    "Gemm",
    "GroupQueryAttention",
    "MatMul",
    "MatMulNBits",
    "MoE",
    "MultiHeadAttention",
    "QMoE",
)


def count_nodes(inference: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        found = counts.setdefault(part.ep_name, Counter())
        found.update(node.op_type for node in part.get_nodes())
    return {provider: dict(sorted(found.items())) for provider, found in counts.items()}


def heavy_on_cpu(placement: Mapping[str, Mapping[str, int]]) -> str:
    """Return the expensive operators on the CPU, such as "30 MatMulNBits"."""
    found = placement.get(_CPU_PROVIDER, {})
    return ", ".join(f"{found[name]} {name}" for name in _HEAVY if name in found)


def require_on_device(inference: Any, chosen: Sequence[ProviderChoice]) -> None:
    """Raises DeviceError if the CPU would compute attention or matrices unasked."""
    if any(choice.kind == CPU for choice in chosen):
        return
    heavy = heavy_on_cpu(count_nodes(inference))
    if heavy:
        names = ",".join(choice.name for choice in chosen)
        raise DeviceError(
            f"onnxruntime would compute {heavy} of this model on the CPU, not on {names}",
            remedy=f"Choose another --device or --runtime, or allow it: --device {names},cpu",
        )
