"""Where and with what a figure was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from edge_spec.placement.processor import cpu_name

_PACKAGES = (
    *("edge-spec", "numpy", "onnxruntime", "tokenizers"),
    *("llama-cpp-python", "ik-llama-cpp-python"),
)


def describe_machine() -> dict[str, Any]:
    """cpu, cores, system, and versions of the libraries that are installed."""
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
