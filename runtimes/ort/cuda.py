"""Queries NVIDIA's driver and explains why a provider does not start.

The driver (https://docs.nvidia.com/cuda/cuda-driver-api) numbers devices as onnxruntime does, with
CUDA_VISIBLE_DEVICES, and is asked first. Patterns match onnxruntime 1.31.1 (cuda_call.cc,
provider_bridge_ort.cc), Linux's and Windows' linkers, and cudaGetErrorString.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t
from ctypes import create_string_buffer as string_buffer
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

from edge_spec.errors import DeviceError, DeviceMemoryError, install

_NO_DRIVER = (
    "no NVIDIA driver is here",
    "Install NVIDIA's driver; a container has to be started with the GPU (docker: --gpus all).",
)
_NO_DEVICE = (
    "NVIDIA's driver shows no device",
    "nvidia-smi says what it sees; CUDA_VISIBLE_DEVICES may hide devices.",
)
_OLD_DRIVER = ("NVIDIA's driver is too old for this onnxruntime", "Update NVIDIA's driver.")

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUresult codes with a remedy.
_REFUSALS = {
    100: _NO_DEVICE,
    803: (
        "the running NVIDIA driver is not the one that is installed",
        "Restart the machine: it was updated since.",
    ),
}
_TEXT_BYTES = 256
CUDA_PROVIDER = "CUDAExecutionProvider"
_FATAL = 4  # onnxruntime's severity
_preparing = Lock()


class CudaDevice(NamedTuple):
    name: str
    total_bytes: int


class CudaDriver(NamedTuple):
    version: tuple[int, int]  # newest CUDA version it runs
    devices: tuple[CudaDevice, ...]  # by number


def cuda_driver() -> CudaDriver:
    """Start and query the driver. Raises DeviceError without a driver or device."""
    try:
        library = CDLL(_DRIVER)
    except OSError as error:
        raise _refused(_NO_DRIVER, str(error)) from None
    _call(library, "cuInit", 0)
    version, count = c_int(), c_int()
    _call(library, "cuDriverGetVersion", byref(version))
    _call(library, "cuDeviceGetCount", byref(count))
    if not count.value:
        raise _refused(_NO_DEVICE, "it counts 0")
    thousands, rest = divmod(version.value, 1000)  # 13020 is 13.2
    return CudaDriver(
        (thousands, rest // 10), tuple(_device(library, number) for number in range(count.value))
    )


def _device(library: CDLL, number: int) -> CudaDevice:
    handle, total = c_int(), c_size_t()
    name = string_buffer(_TEXT_BYTES)
    _call(library, "cuDeviceGet", byref(handle), number)
    _call(library, "cuDeviceGetName", name, len(name), handle)
    _call(library, "cuDeviceTotalMem_v2", byref(total), handle)
    return CudaDevice(name.value.decode(errors="replace"), total.value)


def _call(library: CDLL, function: str, *arguments: object) -> None:
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError as error:
        raise _refused(_OLD_DRIVER, str(error)) from None
    if code:
        words = f"{function}: {_words(library, code)}"
        known = _REFUSALS.get(code)
        other = ("NVIDIA's driver does not start", "nvidia-smi says whether it works at all.")
        raise _refused(known or other, words)


def _words(library: CDLL, code: int) -> str:
    said = c_char_p()
    with suppress(AttributeError):
        library.cuGetErrorString(code, byref(said))
    return (said.value or b"").decode(errors="replace") or f"error {code}"


def _refused(known: tuple[str, str], words: str) -> DeviceError:
    """known: cause and remedy; words: the library's own."""
    cause, remedy = known
    kind = DeviceMemoryError if known == _NO_MEMORY else DeviceError
    return kind(f"{cause} ({words})", remedy=remedy)


def require_driver(onnxruntime: Any, provider: str) -> None:
    """Raises DeviceError if the provider is CUDA's and its driver is missing, old or shows no
    device."""
    if provider != CUDA_PROVIDER:
        return
    driver, built = cuda_driver(), _cuda_version(onnxruntime)
    if not built:
        return
    needed = int(built.partition(".")[0])  # a driver runs all of a major version
    if driver.version[0] < needed:
        newest = ".".join(map(str, driver.version))
        raise _refused(_OLD_DRIVER, f"it runs CUDA {newest}, not {built}")


def prepare_cuda(onnxruntime: Any) -> None:
    """Load NVIDIA's libraries once if onnxruntime uses CUDA. Failures, even later ones, are not
    printed."""
    with _preparing:
        _prepare(onnxruntime)


@cache
def _prepare(onnxruntime: Any) -> None:
    if not _cuda_version(onnxruntime):
        return
    onnxruntime.set_default_logger_severity(_FATAL)
    # preload_dlls prints what it misses. Replace only its module's `print`: other threads may be
    # writing JSON to standard output.
    onnxruntime.print = lambda *words: None
    try:
        onnxruntime.preload_dlls()
    finally:
        del onnxruntime.print


def _cuda_version(onnxruntime: Any) -> str:
    """Return the CUDA version of the build, "" without."""
    return str(getattr(onnxruntime, "cuda_version", None) or "")


_MAX_WORDS = 200  # characters of the library's message
_INSTALL = f"{install('gpu')}, which brings them from NVIDIA's packages."
_NO_MEMORY = (
    "the device has too little free memory",
    "Close what else uses it, or choose a smaller --context, model or another --device.",
)


_LIBRARIES = "(cudnn|cublas|cudart|curand|cufft|nvrtc|nvJitLink)"
# The first match counts. onnxruntime's general message follows each failure, so it is last.
_KNOWN: tuple[tuple[str, tuple[str, str]], ...] = (
    (
        r"CUDA failure (209|222|98): [^;\n]*",
        (
            "this onnxruntime has no kernels for the device",
            "Use llama.cpp (--runtime llamacpp) built for it, or another onnxruntime-gpu.",
        ),
    ),
    (
        r"CUDA failure 2: [^;\n]*|Failed to allocate memory[^\n;]*"
        r"|cudaErrorMemoryAllocation[^\n;]*",
        _NO_MEMORY,
    ),
    (
        rf"lib{_LIBRARIES}[\w.-]*\.so[.\d]*: [^\n]*"
        rf"|undefined symbol: \w+, version lib{_LIBRARIES}[^\n]*"
        rf'|depends on "{_LIBRARIES}[^"]*" which is missing'
        r"|CUDNN failure[^;\n]*|CUDNN_STATUS_[^;\n]*"
        r"|LoadLibrary failed with error 126|Require cuDNN [^\n(]*",
        ("CUDA's or cuDNN's libraries are missing, or of another version", _INSTALL),
    ),
)


def find_cause(text: str) -> DeviceError | None:
    """Return the error for a known message, else None."""
    for pattern, known in _KNOWN:
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            words = " ".join(match[0].split()).rstrip(" .")
            return _refused(known, words[:_MAX_WORDS])
    return None


def start_error(name: str, text: str) -> DeviceError | None:
    """Return the error of starting a device, None for an unknown message."""
    found = find_cause(text)
    if found is None:
        return None
    message = f"onnxruntime cannot start {name}: {found.message}"
    return type(found)(message, remedy=found.remedy)
