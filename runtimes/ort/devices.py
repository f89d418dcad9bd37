"""The devices of onnxruntime's execution providers, built in or from packages of their own."""

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
# Of which its HTP is the NPU. Elsewhere the provider brings an emulator of it, and its compiler.
_ARM = ("aarch64", "arm64")
# Providers that edge-spec uses: others compute the attention of drafts wrong, compile a graph again
# for each new shape of a pass, or have a runtime of their own. QNN's may name the processor that
# compiles for its NPU.
_KINDS: Mapping[str, str] = {CPU: CPU, _CUDA: GPU, "webgpu": GPU, QNN: NPU}
# Whose attention takes float16 and no float32.
TAKES_HALF = frozenset({"CUDAExecutionProvider"})
_NO_OPTIONS: Mapping[str, str] = {}


class ProviderChoice(NamedTuple):
    """Describes what a name of a device stands for."""

    name: str
    provider: str
    kind: str | None
    description: str
    device: Any  # OrtEpDevice; None: of a provider that is built in and does not tell
    options: Mapping[str, str] = _NO_OPTIONS  # of a provider that is built in
    cuda: CudaDevice | None = None

    @property
    def from_package(self) -> bool:
        return self.device is not None and "library_path" in self.device.ep_metadata


def choose(onnxruntime: Any, wanted: Sequence[str]) -> list[ProviderChoice]:
    """Choose providers for names such as "cuda", "cuda:1" or "CUDAExecutionProvider"; for none, the
    CPU's. Packages are loaded where a name is not built in. Raises UsageError."""
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
    """List the choices by name: the provider's, with a number from its second device on ("cuda:1").
    asks_driver: whether CUDA's are distinguished, which starts their driver."""
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
    """Register the providers of installed packages, once; return why those that fail do. Raises
    MissingDependencyError."""
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
        except Exception as error:  # of the package, or onnxruntime's, which share no base class
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
    """Add them to the SessionOptions, where one is a package's; else return what a session takes
    besides. Raises UsageError for providers that do not go together, DeviceError."""
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
    """Return an InferenceSession on these devices. Raises DeviceError where one does not start,
    what onnxruntime does for other faults, and what `add_providers` does. ask: see
    `require_started`."""
    providers = add_providers(settings, chosen)
    try:
        session = import_onnxruntime().InferenceSession(
            graph,
            settings,
            providers=providers,
            enable_fallback=0,  # else it prints why a device fails, and takes the CPU
        )
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
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
    """onnxruntime goes on without a provider that does not start. Raises DeviceError.

    ask: returns why the device of a name does not start, which onnxruntime only logs.
    """
    lost = [choice.name for choice in chosen if choice.provider not in session.get_providers()]
    if lost:
        reason = ask(lost[0]) if ask else None
        raise _lost(lost, f": {reason.rstrip('.')}" if reason else ", and would run on the CPU")


def _has_htp() -> bool:
    """Returns whether this can be a machine of Qualcomm's; whether its NPU works, a trial shows."""
    return platform.machine().lower() in _ARM and sys.platform != "darwin"


def _require_one_each(chosen: Sequence[ProviderChoice]) -> None:
    """onnxruntime would ignore the second device of a provider that is built in."""
    for provider in {choice.provider for choice in chosen if choice.device is None}:
        names = [choice.name for choice in chosen if choice.provider == provider]
        if len(names) > 1:
            raise UsageError(
                f"onnxruntime has {provider} once in a session, not as {' and '.join(names)}",
                remedy="Name one of them.",
            )


def _told_apart(name: str, provider: str, told: Sequence[Any]) -> Iterator[ProviderChoice]:
    """Yields a choice for each OrtEpDevice of a provider, those of its kind first."""
    kind = _KINDS[name]
    told = sorted(told, key=lambda device: device.device.type.name.lower() != kind)
    for number, device in enumerate(told):
        own = _numbered(name, number)
        yield ProviderChoice(own, provider, kind, _description(device), device)


def _cuda_devices(provider: str) -> list[ProviderChoice]:
    """The driver's devices; the provider alone where it shows none, which a start would tell."""
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


RECORDS_PLACEMENT = "session.record_ep_graph_assignment_info"  # "1", before the graph is loaded
_CPU_PROVIDER = "CPUExecutionProvider"
# What takes a model's time; a few nodes that compute shapes or look up rows are not worth a copy.
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
    """Counts the operators of an InferenceSession by the provider that took them."""
    counts: dict[str, Counter[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        found = counts.setdefault(part.ep_name, Counter())
        found.update(node.op_type for node in part.get_nodes())
    return {provider: dict(sorted(found.items())) for provider, found in counts.items()}


def heavy_on_cpu(placement: Mapping[str, Mapping[str, int]]) -> str:
    """List the operators on the CPU that take a model's time, such as "30 MatMulNBits"."""
    found = placement.get(_CPU_PROVIDER, {})
    return ", ".join(f"{found[name]} {name}" for name in _HEAVY if name in found)


def require_on_device(inference: Any, chosen: Sequence[ProviderChoice]) -> None:
    """Raises DeviceError where another device than the CPU was asked for alone, and the CPU would
    compute attention or matrices."""
    if any(choice.kind == CPU for choice in chosen):
        return
    heavy = heavy_on_cpu(count_nodes(inference))
    if heavy:
        names = ",".join(choice.name for choice in chosen)
        raise DeviceError(
            f"onnxruntime would compute {heavy} of this model on the CPU, not on {names}",
            remedy=f"Choose another --device or --runtime, or allow it: --device {names},cpu",
        )
