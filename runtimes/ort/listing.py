"""Tries which devices of onnxruntime really work, as `edge-spec devices` shows them.

A small graph asks of a device what a model needs. One MatMulNBits makes queries, keys and values,
with which a GroupQueryAttention attends to a few cached tokens and their own, rotated by their
positions, as in a bundle's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.models.devices import CPU, Device, processor
from edge_spec.runtimes.ort import devices, rows
from edge_spec.runtimes.ort.cuda_driver import free_bytes, prepare_cuda, require_driver
from edge_spec.runtimes.ort.devices import RECORDS_PLACEMENT, count_nodes, heavy_on_cpu
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.signature import ELEMENT_NAMES
from edge_spec.runtimes.ort.start_errors import find_cause, start_error

_OPSET, _IR_VERSION = 17, 8
_HEADS, _HEAD_DIM, _BLOCK = 2, 64, 32  # two heads share one of keys and values
_WIDTH = _HEADS * _HEAD_DIM
_PACKED = _WIDTH + 2 * _HEAD_DIM  # queries, a key and a value of a token
_CACHED, _ROWS = 4, 2
_TOTAL = _CACHED + _ROWS


class Probe(NamedTuple):
    model: bytes  # a serialized ModelProto; one output
    feeds: dict[str, np.ndarray]


def attention_probe(dtype: np.dtype[Any]) -> Probe:
    """Returns one whose matrices, attention and cache are float32 or float16."""
    random = np.random.RandomState(0)
    quantized = random.randint(0, 16, (_PACKED, _WIDTH // _BLOCK, _BLOCK))
    scales = random.uniform(0.01, 0.02, (_PACKED, _WIDTH // _BLOCK)).astype(dtype)
    angles = np.arange(_TOTAL)[:, None] * 0.5 ** np.arange(_HEAD_DIM // 2)
    weights = {
        "packed": (quantized[..., ::2] | quantized[..., 1::2] << 4).astype(np.uint8),
        "scales": scales.reshape(-1),
        "cos": np.cos(angles).astype(dtype),
        "sin": np.sin(angles).astype(dtype),
        "last": np.array([_TOTAL - 1], np.int32),
        "total": np.array(_TOTAL, np.int32),
    }
    feeds = {
        "rows": random.uniform(-1, 1, (1, _ROWS, _WIDTH)).astype(dtype),
        "past_key": random.uniform(-1, 1, (1, 1, _CACHED, _HEAD_DIM)).astype(dtype),
        "past_value": random.uniform(-1, 1, (1, 1, _CACHED, _HEAD_DIM)).astype(dtype),
    }
    return Probe(_model(weights, feeds), feeds)


def _model(weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> bytes:
    from onnx import numpy_helper, parser

    kind = ELEMENT_NAMES[feeds["rows"].dtype.name]
    cache = f"{kind}[1, 1, {_TOTAL}, {_HEAD_DIM}]"
    inputs = [f"{kind}{list(value.shape)} {name}" for name, value in feeds.items()]
    model: Any = parser.parse_model(f"""
        <ir_version: {_IR_VERSION}, opset_import: ["": {_OPSET}, "com.microsoft": 1]>
        probe ({", ".join(inputs)}) => ({kind}[1, {_ROWS}, {_WIDTH}] attended,
                                        {cache} present_key, {cache} present_value) {{
            qkv = com.microsoft.MatMulNBits <K = {_WIDTH}, N = {_PACKED}, bits = 4,
                                             block_size = {_BLOCK}> (rows, packed, scales)
            attended, present_key, present_value = com.microsoft.GroupQueryAttention
                <num_heads = {_HEADS}, kv_num_heads = 1, do_rotary = 1>
                (qkv, , , past_key, past_value, last, total, cos, sin)
        }}""")
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    model.graph.initializer.extend(constants)
    serialized: bytes = model.SerializeToString()
    return serialized


_RUNTIME = "ort"
_PROBE_S = 40.0  # a driver may compile its kernels first
_ERROR = 3  # onnxruntime's severity
_HALF = ("CUDAExecutionProvider",)  # whose attention takes float16 and no float32
_MEGABYTES = re.compile(r"(\d+) MB")  # as onnxruntime tells a card's memory on Windows


def listed() -> Iterator[Device]:
    """A provider works if it takes a graph alone, which is tried in a process of its own. Whether
    its numbers are right, the trial of a model says. Raises MissingDependencyError."""
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
    if not np.isfinite(session.run(["attended"], probe.feeds)[0]).all():
        raise ValueError("its numbers are wrong")
