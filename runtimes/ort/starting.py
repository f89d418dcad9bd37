"""Prepares a provider's start, so that it starts, or says why it does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.runtimes.ort.cuda_driver import OLD_DRIVER, cuda_driver

_CUDA = "CUDAExecutionProvider"
_FATAL = 4  # onnxruntime's severity
_preparing = Lock()


def require_driver(onnxruntime: Any, providers: Sequence[str]) -> None:
    """Raises DeviceError where CUDA is among the providers, and its driver is missing, shows no
    device, or is older than this onnxruntime's CUDA."""
    if _CUDA not in providers:
        return
    driver, built = cuda_driver(), _cuda_version(onnxruntime)
    if not built:
        return
    needed = int(built.partition(".")[0])  # a driver runs all of one major version
    if driver.version[0] < needed:
        cause, remedy = OLD_DRIVER
        newest = ".".join(map(str, driver.version))
        raise DeviceError(f"{cause} (it runs CUDA {newest}, not {built})", remedy=remedy)


def prepare_cuda(onnxruntime: Any) -> None:
    """Loads, once, the libraries that NVIDIA's packages bring, where this onnxruntime uses CUDA.

    Neither this nor a start that fails later prints: what it would say is in the error.
    """
    with _preparing:
        _prepare(onnxruntime)


@cache
def _prepare(onnxruntime: Any) -> None:
    if not _cuda_version(onnxruntime):
        return
    onnxruntime.set_default_logger_severity(_FATAL)
    # It prints what it does not find. Only its own `print` is replaced: other threads may write to
    # standard output meanwhile, which may carry JSON.
    onnxruntime.print = lambda *words: None
    try:
        onnxruntime.preload_dlls()
    finally:
        del onnxruntime.print


def _cuda_version(onnxruntime: Any) -> str:
    """Returns the version of the CUDA that it was built with; empty where without."""
    return str(getattr(onnxruntime, "cuda_version", None) or "")
