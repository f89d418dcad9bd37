"""Which devices of onnxruntime really work, as `edge-spec devices` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.placement.devices import CPU, Device, processor
from edge_spec.placement.isolated import IsolatedError, isolated
from edge_spec.runtimes.ort import devices

_RUNTIME = "ort"
_PROBE_S = 40.0  # a driver may compile its kernels first
_OPSET, _IR_VERSION = 17, 8
_SIZE = 64
_TOLERANCE = 0.02  # of the largest product: devices may compute in float16


def listed() -> Iterator[Device]:
    """A provider works if it takes a graph alone and its numbers are right: it is tried, each in a
    process of its own. Raises MissingDependencyError."""
    onnxruntime = devices.import_onnxruntime()
    packages = devices.load_packages()
    found = devices.choices(onnxruntime)
    with ThreadPoolExecutor() as pool:
        faults = dict(zip(found, pool.map(fault, found), strict=True))
    for name, choice in found.items():
        device = Device(_RUNTIME, name, choice.kind, choice.description)
        yield replace(processor(_RUNTIME) if name == CPU else device, fault=faults[name])
    for package, reason in packages.items():
        yield Device(_RUNTIME, package, None, "package", fault=reason)


def fault(name: str) -> str | None:
    """Why a device cannot be used, in one line; None where it can."""
    try:
        isolated(_probe, name, timeout_s=_PROBE_S)
    except IsolatedError as error:
        return str(error)
    return None


def _probe(name: str) -> None:
    """Raises ValueError for wrong numbers, and whatever the library raises."""
    onnxruntime = devices.import_onnxruntime()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    chosen = devices.choose(onnxruntime, [name])
    if name != CPU:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    weights = np.random.RandomState(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    session = onnxruntime.InferenceSession(
        _matrix_product(weights), settings, providers=devices.add_providers(settings, chosen)
    )
    devices.require_started(session, chosen)
    row = np.linspace(-1, 1, _SIZE, dtype=np.float32)[None]
    expected = row @ weights
    (product,) = session.run(None, {"row": row})
    error = np.abs(product - expected).max() / np.abs(expected).max()
    if not error <= _TOLERANCE:
        raise ValueError(f"its numbers are wrong: a product is off by {error:.1%}")


def _matrix_product(weights: np.ndarray) -> bytes:
    """An ONNX model: row [1, n] @ weights [n, n] -> product [1, n]."""
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["row", "weights"], ["product"])],
        "product",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, len(weights)])],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, [1, len(weights)])],
        [numpy_helper.from_array(weights, "weights")],
    )
    opset = helper.make_opsetid("", _OPSET)
    model: Any = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
    serialized: bytes = model.SerializeToString()
    return serialized
