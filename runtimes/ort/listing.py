"""Tests which onnxruntime devices work, for `edge-spec devices`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.models.devices import CPU, Device, processor
from edge_spec.runtimes.ort import devices, rows
from edge_spec.runtimes.ort.cuda import CUDA_PROVIDER, find_cause, require_driver
from edge_spec.runtimes.ort.devices import (
    PROCESSOR,
    QNN_PACKAGE,
    RECORDS_PLACEMENT,
    count_nodes,
    heavy_on_cpu,
)
from edge_spec.runtimes.ort.library import import_onnxruntime

_RUNTIME = "ort"
_PROBE_S = 40.0  # a driver may compile its kernels first
_ERROR = 3  # onnxruntime's severity


def listed() -> Iterator[Device]:
    """List devices after multiplying matrices on each in an isolated process. Only opening a model
    shows whether it is right. Raises MissingDependencyError."""
    onnxruntime = import_onnxruntime()
    found = devices.find_devices(onnxruntime)
    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(fault, found))
    for device, reason in zip(found.values(), faults, strict=True):
        yield _describe(device, reason)
    unusable = devices.load_qnn()
    if unusable is not None:
        yield Device(_RUNTIME, QNN_PACKAGE, None, "package", fault=unusable)


def fault(name: str) -> str | None:
    """Return in one line why a device cannot be used, or None."""
    try:
        isolated(_probe, name, timeout_s=_PROBE_S)
    except IsolatedError as error:
        return str(find_cause(error.printed) or error)
    return None


def _describe(device: devices.OrtDevice, fault: str | None) -> Device:
    if device == PROCESSOR:
        return replace(processor(_RUNTIME), fault=fault, kernels=rows.description())
    total = None if device.cuda is None else device.cuda.total_bytes
    return Device(_RUNTIME, device.name, device.kind, device.description, total, fault=fault)


def _probe(name: str) -> None:
    """Raises ValueError for a wrong product, and the library's errors."""
    from onnx import parser

    onnxruntime = import_onnxruntime()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry(RECORDS_PLACEMENT, "1")
    chosen = devices.choose(onnxruntime, [name])
    require_driver(onnxruntime, chosen.provider)
    onnxruntime.set_default_logger_severity(_ERROR)  # `fault` reads what it prints
    kind = "float16" if chosen.provider == CUDA_PROVIDER else "float"
    model: Any = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        probe ({kind}[2, 2] x) => ({kind}[2, 2] y) {{ y = MatMul (x, x) }}""")
    session = devices.start_session(model.SerializeToString(), settings, chosen)
    if name != CPU and heavy_on_cpu(count_nodes(session)):
        raise ValueError("it leaves matrices to the CPU")
    ones = np.ones((2, 2), np.float16 if kind == "float16" else np.float32)
    if not np.all(session.run(["y"], {"x": ones})[0] == 2):
        raise ValueError("its numbers are wrong")
