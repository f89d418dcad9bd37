"""This machine: its processor, its system and installed versions."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_CPUINFO = Path("/proc/cpuinfo")
_IDLE = slice(3, 5)  # columns of /proc/stat: idle and iowait
_WATCHED_S = 0.5
_AT_HWCAP2 = 26  # key for getauxval(3)
# In Linux's HWCAP2, not reported by numpy.
_ARM_BITS = {"SVE2": 1, "I8MM": 13, "BF16": 14, "SME": 23}
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
    """Return sorted vector extensions: those beyond numpy's baseline, and ARM's that numpy
    omits."""
    extensions: Mapping[str, Any] = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return tuple(sorted({*map(str, extensions.get("found", ())), *_arm_features()}))


def _arm_features() -> list[str]:
    """Return ARM extensions, of which I8MM matters most for integer kernels; Linux only."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return []
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    bits = getauxval(_AT_HWCAP2)
    return [name for name, bit in _ARM_BITS.items() if bits >> bit & 1]


def busy_share() -> float | None:
    """Return the busy share of all cores over half a second; None except on Linux."""
    try:
        before = _core_times()
        time.sleep(_WATCHED_S)
        taken = _core_times() - before
    except OSError:
        return None
    return float(1 - taken[_IDLE].sum() / taken.sum()) if taken.sum() > 0 else None


def _core_times() -> np.ndarray:
    """Return [8] int64: user, nice, system, idle, iowait and so on (proc(5)). Raises OSError."""
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    return np.array(first.split()[1:9], np.int64)


def on_battery() -> bool:
    """Return True if a battery is discharging, where the system tells (Linux)."""
    for status in Path("/sys/class/power_supply").glob("*/status"):
        try:
            if status.read_text(encoding="ascii").strip() == "Discharging":
                return True
        except OSError:  # the battery may have been removed
            continue
    return False


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Describe where a figure was measured: processor, cores, system, library versions."""
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
