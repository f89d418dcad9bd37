"""This machine: its processor, its system, and the versions of what is installed."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_CPUINFO = Path("/proc/cpuinfo")
_IDLE = slice(3, 5)  # of the times of /proc/stat
_AT_HWCAP2 = 26  # of getauxval(3)
_ARM_BITS = {
    "SVE2": 1,
    "I8MM": 13,
    "BF16": 14,
    "SME": 23,
}  # of Linux' HWCAP2, that numpy leaves out
_PACKAGES = (
    *("edge-spec", "numpy", "onnxruntime", "tokenizers"),
    *("onnxruntime-gpu", "onnxruntime-qnn", "openvino", "coremltools"),
    "llama-cpp-python",
)


def cpu_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Names of the vector instructions that the processor has beyond what numpy is built for, as
    it tells numpy, and those of ARM that numpy does not ask for; sorted."""
    extensions: Mapping[str, Any] = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return tuple(sorted({*map(str, extensions.get("found", ())), *_arm_features()}))


def _arm_features() -> list[str]:
    """Kernels for integers are chosen by I8MM above all. None on other systems than Linux."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return []
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    bits = getauxval(_AT_HWCAP2)
    return [name for name, bit in _ARM_BITS.items() if bits >> bit & 1]


def core_times() -> list[int] | None:
    """Returns user, nice, system, idle, iowait time and so on (proc(5)); None on other systems than
    Linux."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    return [int(each) for each in first.split()[1:9]]


def busy_share(
    seconds: float = 0.5, times: Callable[[], list[int] | None] = core_times
) -> float | None:
    """Returns the share of all cores' time that this process and others take; None where the system
    does not say. seconds: that it watches for."""
    before = times()
    if before is None:
        return None
    time.sleep(seconds)
    after = times()
    if after is None or sum(after) <= sum(before):
        return None
    idle, total = (sum(after[span]) - sum(before[span]) for span in (_IDLE, slice(None)))
    return 1 - idle / total


def on_battery() -> bool:
    """Says whether a battery is being discharged, where the system knows (Linux)."""
    for status in Path("/sys/class/power_supply").glob("*/status"):
        try:
            if status.read_text(encoding="ascii").strip() == "Discharging":
                return True
        except OSError:  # a battery may be taken out
            continue
    return False


def available_cores() -> int:
    """Returns how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Says where and with what a figure was measured: cpu, cores, system, and versions of the
    libraries that are installed."""
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
    }
