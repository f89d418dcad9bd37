"""Static models in OpenVINO: a graph for each number of rows.

For GPU and NPU, graphs are compiled (which takes minutes), tested and cached. The CPU compiles a
graph at first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, Memory
from edge_spec.models.kept import compiled_bundle
from edge_spec.runtimes.openvino.library import IN_FLOAT32, OpenVinoDevice, import_openvino, reason
from edge_spec.runtimes.static import trial
from edge_spec.runtimes.static.onnx_program import PAST, OnnxProgram, OpenedGraphs
from edge_spec.runtimes.static.session import (
    StaticModel,
    config_of,
    session_bytes,
)

DATA_FILE = "model.onnx.data"
LIBRARY_BYTES = 90_000_000  # code and tables in use
_ANOTHER = "Choose another --device, or export another static bundle."


def open_static(bundle: Bundle, options: RuntimeOptions, device: OpenVinoDevice) -> StaticModel:
    """Raises UsageError for a context beyond the bundle's cache, BundleError, DeviceError if graphs
    cannot be compiled or the device computes them wrong."""
    config = config_of(bundle, options)
    opened = OpenedGraphs.of(bundle)

    def compile_function(function: str) -> Any:
        path = str(bundle.file(opened.files[function]))
        try:
            return device.compile(path)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot compile {path} for {device.name}: {reason(error)}",
                remedy=_ANOTHER,
            ) from error

    graph_of: Callable[[str], Any] = compile_function
    if device.name != CPU:
        graph_of = _load_kept(bundle, opened, device, compile_function).__getitem__
    program = OpenVinoGraphs(opened, graph_of, device.name)
    return StaticModel(program, opened.layout, config)


def _load_kept(
    bundle: Bundle,
    opened: OpenedGraphs,
    device: OpenVinoDevice,
    compile_function: Callable[[str], Any],
) -> dict[str, Any]:
    kept = compiled_bundle(bundle, f"openvino-{device.name.replace(':', '-')}", device.key)

    def compile_into(work: Path) -> None:
        compiled = {function: compile_function(function) for function in opened.files}
        _require_right(bundle, opened, compiled, device)
        for name, each in compiled.items():
            stream = BytesIO()
            try:
                each.export_model(stream)
            except RuntimeError as error:
                raise DeviceError(
                    f"openvino cannot keep what it compiled for {device.name}: {reason(error)}",
                    remedy="Update openvino and the driver, or choose another --device.",
                ) from error
            (work / f"{name}.blob").write_bytes(stream.getvalue())

    def load() -> dict[str, Any]:
        compiled = kept.get(compile_into)
        return {
            name: device.load((compiled / f"{name}.blob").read_bytes()) for name in opened.files
        }

    try:
        return load()
    except RuntimeError as error:  # an intact graph that this machine refuses
        kept.drop(reason(error))
        return load()


def _require_right(
    bundle: Bundle, opened: OpenedGraphs, compiled: Mapping[str, Any], device: OpenVinoDevice
) -> None:
    """Compare a few scores with the CPU's. Raises DeviceError."""

    def on_cpu(function: str) -> Any:
        path = str(bundle.file(opened.files[function]))
        return device.core.compile_model(path, "CPU", IN_FLOAT32)

    def scores(graph_of: Callable[[str], Any]) -> np.ndarray:
        program = OpenVinoGraphs(opened, graph_of, device.name)
        return trial.scores(StaticModel(program, opened.layout, bundle.config))

    trial.require_same(scores(compiled.__getitem__), scores(on_cpu), device.name)


class OpenVinoGraphs(OnnxProgram):
    """Static graphs in OpenVINO. compiled: returns a function's CompiledModel, called at first use.

    The last session's states stay bound; other inputs are copied to arrays of the request.
    """

    def __init__(self, opened: OpenedGraphs, compiled: Callable[[str], Any], device: str) -> None:
        super().__init__(opened)
        self._compiled = compiled
        self._device = device
        self._requests: dict[str, _Request] = {}
        self._lock = Lock()  # sessions may run in threads

    def run(self, function: str, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Raises DeviceError if the device fails or vanished, such as an NPU after sleep."""
        with self._lock:
            try:
                if function not in self._requests:
                    self._requests[function] = _Request(self._compiled(function))
                return self._requests[function].run(inputs)
            except RuntimeError as error:  # OpenVINO raises no other class
                self._requests.pop(function, None)
                raise DeviceError(
                    f"{self._device} failed to run {function}: {reason(error)}",
                    remedy="Ask again; if it stays, start again, or choose another --device.",
                ) from error


class _Request:
    """An infer request and its bound arrays."""

    def __init__(self, compiled: Any) -> None:
        self._tensor = import_openvino().Tensor
        self._request = compiled.create_infer_request()
        self._outputs = [value.names for value in compiled.outputs]  # a tensor may have several
        self._bound: dict[str, np.ndarray] = {}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies, since another session's pass overwrites the request's arrays."""
        for name, array in inputs.items():
            if name.startswith(PAST):
                if self._bound.get(name) is not array:
                    self._bind(name, array)
            elif name in self._bound:
                self._bound[name][...] = array
            else:
                self._bind(name, array.copy())
        self._request.start_async()
        self._request.wait()
        copies = [
            self._request.get_output_tensor(at).data.copy() for at in range(len(self._outputs))
        ]
        return {
            name: copy for names, copy in zip(self._outputs, copies, strict=True) for name in names
        }

    def _bind(self, name: str, array: np.ndarray) -> None:
        self._request.set_tensor(name, self._tensor(array, shared_memory=True))
        self._bound[name] = array


def static_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecast memory from the manifest, the same for any number of tokens: a session allocates all
    its slots. Nothing was measured on a GPU or NPU."""
    states, scores = session_bytes(bundle, options, num_tokens)
    num_functions = sum(name.endswith(".onnx") for name in bundle.manifest.files)
    weights = num_functions * bundle.manifest.files[DATA_FILE].num_bytes  # in each compiled graph
    device = options.providers[0].lower() if options.providers else CPU
    if device == CPU:
        return Memory(weights, states, scores, LIBRARY_BYTES)
    return Memory(0, states, 0, LIBRARY_BYTES, on_devices={device: weights + scores})
