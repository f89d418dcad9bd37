"""Tests which onnxruntime devices work, for `edge-spec devices`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.models.devices import CPU, Device, processor
from edge_spec.runtimes.ort import devices, rows
from edge_spec.runtimes.ort.cuda import (
    find_cause,
    free_bytes,
    prepare_cuda,
    require_driver,
)
from edge_spec.runtimes.ort.devices import (
    RECORDS_PLACEMENT,
    TAKES_HALF,
    count_nodes,
    heavy_on_cpu,
)
from edge_spec.runtimes.ort.library import import_onnxruntime

_RUNTIME = "ort"
_PROBE_S = 40.0  # a driver may compile its kernels first
_ERROR = 3  # onnxruntime's severity
_MEGABYTES = re.compile(r"(\d+) MB")  # a card's memory on Windows


def listed() -> Iterator[Device]:
    """List devices after multiplying matrices on each in an isolated process. Only opening a model
    shows whether it is right. Raises MissingDependencyError."""
    onnxruntime = import_onnxruntime()
    packages = devices.load_packages()
    prepare_cuda(onnxruntime)
    found = devices.choices(onnxruntime)
    with ThreadPoolExecutor() as pool:
        faults = dict(zip(found, pool.map(fault, found), strict=True))
    for name, choice in found.items():
        yield _described(choice, faults[name])
    for package, reason in packages.items():
        yield Device(_RUNTIME, package, None, "package", fault=reason)


def fault(name: str) -> str | None:
    """Return in one line why a device cannot be used, or None."""
    try:
        isolated(_probe, name, timeout_s=_PROBE_S)
    except IsolatedError as error:
        return str(find_cause(error.printed) or error)
    return None


def _described(choice: devices.ProviderChoice, fault: str | None) -> Device:
    if choice.name == CPU:
        return replace(processor(_RUNTIME), fault=fault, kernels=rows.description())
    total = free = None
    if choice.cuda is not None:
        total, free = choice.cuda.total_bytes, free_bytes(choice.cuda)
    elif choice.device is not None:
        told = _MEGABYTES.fullmatch(choice.device.device.metadata.get("DxgiVideoMemory", ""))
        total = int(told[1]) << 20 if told else None
    return Device(_RUNTIME, choice.name, choice.kind, choice.description, total, free, fault)


def _probe(name: str) -> None:
    """Raises ValueError for a wrong product, and the library's errors."""
    from onnx import parser

    onnxruntime = import_onnxruntime()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry(RECORDS_PLACEMENT, "1")
    chosen = devices.choose(onnxruntime, [name])
    require_driver(onnxruntime, [choice.provider for choice in chosen])
    onnxruntime.set_default_logger_severity(_ERROR)  # `fault` reads what it prints
    kind = "float16" if chosen[0].provider in TAKES_HALF else "float"
    model: Any = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        probe ({kind}[2, 2] x) => ({kind}[2, 2] y) {{ y = MatMul (x, x) }}""")
    session = devices.start_session(model.SerializeToString(), settings, chosen)
    if name != CPU and heavy_on_cpu(count_nodes(session)):
        raise ValueError("it leaves matrices to the CPU")
    ones = np.ones((2, 2), np.float16 if kind == "float16" else np.float32)
    if not np.all(session.run(["y"], {"x": ones})[0] == 2):
        raise ValueError("its numbers are wrong")
