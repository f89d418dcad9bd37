"""Tries which devices of onnxruntime really work, as `edge-spec devices` shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.fitting.devices import CPU, Device, processor
from edge_spec.runtimes.ort import devices, rows
from edge_spec.runtimes.ort.cuda_driver import free_bytes, prepare_cuda, require_driver
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.node_placement import RECORDS_PLACEMENT, count_nodes, heavy_on_cpu
from edge_spec.runtimes.ort.probe_graph import attention_probe
from edge_spec.runtimes.ort.start_errors import find_cause, start_error

_RUNTIME = "ort"
_PROBE_S = 40.0  # a driver may compile its kernels first
_ERROR = 3  # onnxruntime's severity
_TOLERANCE = 0.02  # of the largest number: devices compute in float16, the CPU in int8
_HALF = ("CUDAExecutionProvider",)  # whose attention takes float16 and no float32
_MEGABYTES = re.compile(r"(\d+) MB")  # as onnxruntime tells a card's memory on Windows


def listed() -> Iterator[Device]:
    """A provider works if it takes a graph alone and its numbers are right: it is tried, each in a
    process of its own. Raises MissingDependencyError."""
    onnxruntime = import_onnxruntime()
    packages = devices.load_packages()
    prepare_cuda(onnxruntime)
    found = devices.choices(onnxruntime)
    with ThreadPoolExecutor() as pool:
        faults = dict(zip(found, pool.map(fault, found), strict=True))
    for name, choice in found.items():
        yield _described(choice, faults[name])
    for name, reason in devices.unused(onnxruntime).items():
        yield Device(_RUNTIME, name, None, "not used", fault=reason)
    for package, reason in packages.items():
        yield Device(_RUNTIME, package, None, "package", fault=reason)


def fault(name: str) -> str | None:
    """Why a device cannot be used, in one line; None where it can."""
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
    """Raises ValueError for wrong numbers, and whatever the library raises."""
    onnxruntime = import_onnxruntime()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry(RECORDS_PLACEMENT, "1")
    chosen = devices.choose(onnxruntime, [name])
    require_driver(onnxruntime, [choice.provider for choice in chosen])
    onnxruntime.set_default_logger_severity(_ERROR)  # what it prints is read: see `fault`
    half = chosen[0].provider in _HALF
    probe = attention_probe(np.dtype(np.float16 if half else np.float32))
    providers = devices.add_providers(settings, chosen)
    try:
        session = onnxruntime.InferenceSession(
            probe.model, settings, providers=providers, enable_fallback=0
        )
    except Exception as error:
        raise start_error([name], str(error)) or error from error
    devices.require_started(session, chosen)
    heavy = heavy_on_cpu(count_nodes(session)) if name != CPU else ""
    if heavy:
        raise ValueError(f"it leaves {heavy} of a model's layer to the CPU")
    found = session.run(["attended"], probe.feeds)[0].astype(np.float32)
    off = np.abs(found - probe.expected).max() / np.abs(probe.expected).max()
    if not off <= _TOLERANCE:
        raise ValueError(f"its numbers are wrong: attention is off by {off:.1%}")
