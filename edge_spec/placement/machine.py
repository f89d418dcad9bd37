"""This machine: its processor, its system, and the versions of what is installed."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")
_PACKAGES = (
    *("edge-spec", "numpy", "onnxruntime", "tokenizers"),
    *("llama-cpp-python", "ik-llama-cpp-python"),
)


def cpu_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Says where and with what a figure was measured: cpu, cores, system, and versions of the
    libraries that are installed."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
