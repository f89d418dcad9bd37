"""Devices that onnxruntime computes on: the processor, CUDA's, and a Qualcomm NPU.

Other providers compute draft trees' attention wrong, recompile the graph for each new pass shape,
copy the whole cache for each pass, or have a runtime of their own.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edge_spec.errors import DeviceError
from edge_spec.models.devices import CPU, GPU, NPU
from edge_spec.runtimes.libraries import pick_device
from edge_spec.runtimes.ort.cuda import (
    CUDA_PROVIDER,
    CudaDevice,
    cuda_driver,
    prepare_cuda,
    start_error,
)
from edge_spec.runtimes.ort.library import import_onnxruntime

CPU_PROVIDER = "CPUExecutionProvider"
_SUFFIX = "executionprovider"
_CUDA, QNN = "cuda", "qnn"
QNN_PACKAGE = "onnxruntime-qnn"
_QNN_MODULE = "onnxruntime_qnn"  # has get_library_path() and get_ep_name()
# Machines where QNN's HTP is an NPU; elsewhere it is an emulator and a compiler.
_ARM = ("aarch64", "arm64")


class OrtDevice(NamedTuple):
    """A device and its provider. number: among CUDA's; handle: QNN's OrtEpDevice."""

    name: str
    provider: str
    kind: str
    description: str
    number: int = 0
    cuda: CudaDevice | None = None
    handle: Any = None


PROCESSOR = OrtDevice(CPU, CPU_PROVIDER, CPU, CPU_PROVIDER)


def choose(onnxruntime: Any, wanted: Sequence[str]) -> OrtDevice:
    """Return the device of a name such as "cuda", "cuda:1" or "CUDAExecutionProvider"; none: the
    CPU. Raises UsageError."""
    names = [_short(name) for name in wanted]
    if set(names) <= {CPU}:
        return PROCESSOR
    known = find_devices(onnxruntime)
    return known[pick_device("onnxruntime", names, known) or CPU]


def find_devices(onnxruntime: Any) -> dict[str, OrtDevice]:
    """Return the devices by name, numbered from the second of CUDA's on ("cuda:1"). Starts CUDA's
    driver."""
    prepare_cuda(onnxruntime)
    load_qnn()
    found = [PROCESSOR]
    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        found += _cuda_devices()
    handles = [each for each in onnxruntime.get_ep_devices() if _short(each.ep_name) == QNN]
    if handles and _has_htp():
        handles.sort(key=lambda each: each.device.type.name.lower() != NPU)
        provider = handles[0].ep_name
        found.append(OrtDevice(QNN, provider, NPU, _describe(handles[0]), handle=handles[0]))
    return {device.name: device for device in found}


@cache
def load_qnn() -> str | None:
    """Register the provider of `QNN_PACKAGE` once, if installed; return why it cannot be used.
    Raises MissingDependencyError."""
    onnxruntime = import_onnxruntime()
    if find_spec(_QNN_MODULE) is None:
        return None
    try:
        package: Any = import_module(_QNN_MODULE)
        provider = package.get_ep_name()
        onnxruntime.register_execution_provider_library(provider, package.get_library_path())
    except Exception as error:  # the package's or onnxruntime's own
        return f"it does not load: {' '.join(str(error).split())}"
    if provider not in onnxruntime.get_available_providers():
        return "it finds no device"
    return None if _has_htp() else "no NPU of Qualcomm's is here: it compiles for others, no more"


def start_session(
    graph: str | Path | bytes,
    settings: Any,
    device: OrtDevice,
    ask: Callable[[str], str | None] | None = None,
) -> Any:
    """Return an InferenceSession. Raises DeviceError if the device does not start, and
    onnxruntime's errors. ask: see `require_started`."""
    how = {"device_id": str(device.number)} if device.cuda is not None else {}
    if device.handle is not None:
        try:
            settings.add_provider_for_devices([device.handle], {})
        except Exception as error:
            raise _lost(device, f": {error}") from error
    providers = None if device.handle is not None else [(device.provider, how)]
    try:
        session = import_onnxruntime().InferenceSession(
            graph,
            settings,
            providers=providers,
            enable_fallback=0,  # or it prints the fault and falls back to the CPU
        )
    except Exception as error:  # onnxruntime's share no base class
        known = None if device.kind == CPU else start_error(device.name, str(error))
        if known is None:
            raise
        raise known from error
    require_started(session, device, ask)
    return session


def require_started(
    session: Any, device: OrtDevice, ask: Callable[[str], str | None] | None = None
) -> None:
    """Raises DeviceError if onnxruntime goes on without the provider. ask: returns why a device
    does not start, which onnxruntime only logs."""
    if device.provider not in session.get_providers():
        reason = ask(device.name) if ask else None
        why = f": {reason.rstrip('.')}" if reason else ", and would run on the CPU"
        raise _lost(device, why)


def _lost(device: OrtDevice, why: str) -> DeviceError:
    return DeviceError(
        f"onnxruntime cannot start {device.name}{why}",
        remedy="Choose another --device; edge-spec devices says what works.",
    )


def _has_htp() -> bool:
    """Return whether this may be a Qualcomm machine with an NPU."""
    return platform.machine().lower() in _ARM and sys.platform != "darwin"


def _cuda_devices() -> list[OrtDevice]:
    """Return the driver's devices, or just the provider, so that a start explains why there are
    none."""
    try:
        devices = cuda_driver().devices
    except DeviceError:
        return [OrtDevice(_CUDA, CUDA_PROVIDER, GPU, CUDA_PROVIDER)]
    return [
        OrtDevice(f"{_CUDA}:{n}" if n else _CUDA, CUDA_PROVIDER, GPU, device.name, n, device)
        for n, device in enumerate(devices)
    ]


def _short(name: str) -> str:
    return name.lower().replace(_SUFFIX, "")


def _describe(handle: Any) -> str:
    data = {**handle.device.metadata, **handle.ep_metadata}
    told = data.get("FULL_DEVICE_NAME") or data.get("Description")
    return str(told or f"{handle.device.vendor} {handle.device.type.name}")


RECORDS_PLACEMENT = "session.record_ep_graph_assignment_info"  # set to "1" before loading
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
    found = placement.get(CPU_PROVIDER, {})
    return ", ".join(f"{found[name]} {name}" for name in _HEAVY if name in found)


def require_on_device(inference: Any, device: OrtDevice) -> None:
    """Raises DeviceError if the CPU would compute attention or matrices instead of the device."""
    if device.kind == CPU:
        return
    heavy = heavy_on_cpu(count_nodes(inference))
    if heavy:
        raise DeviceError(
            f"onnxruntime would compute {heavy} of this model on the CPU, not on {device.name}",
            remedy="Choose another --device or --runtime.",
        )
