"""Opens static bundles for the NPU: compiles their graphs once, and tries them once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceError
from edge_spec.models.bundle import Bundle
from edge_spec.models.kept import compiled_bundle
from edge_spec.runtimes.openvino.library import NpuDevice, import_openvino, reason
from edge_spec.runtimes.openvino.memory import require_npu_memory
from edge_spec.runtimes.static.onnx_program import PAST, OnnxProgram, OpenedGraphs
from edge_spec.runtimes.static.session import Interruption, StaticModel, config_of

_ANOTHER = "Choose another --device, or export another static bundle."
_TREE = (-1, 0, 0, 2)  # so that masks and positions are tried, too
# Of the scores' deviation: float16 is off by less than a tenth of it, a wrong mask, position or
# matrix by about 1.
_TOLERANCE = 0.25


def open_for_npu(bundle: Bundle, options: RuntimeOptions, device: NpuDevice) -> StaticModel:
    """bundle: of fixed shapes. Raises UsageError for a context beyond its cache, BundleError,
    DeviceMemoryError for more than the NPU may map, DeviceError where graphs cannot
    be compiled or the NPU computes them wrong."""
    config = config_of(bundle, options)
    opened = OpenedGraphs.of(bundle)
    require_npu_memory(bundle, device)
    kept = compiled_bundle(bundle, f"openvino-npu-{device.runs_on.lower()}", device.key)

    def load() -> dict[str, Any]:
        """Raises RuntimeError."""
        compiled = kept.get(lambda work: _compile_into(work, bundle, opened, device))
        return {
            name: device.load((compiled / f"{name}.blob").read_bytes()) for name in opened.files
        }

    try:
        graphs = load()
    except RuntimeError as error:  # of a graph that is whole, and that this machine refuses
        kept.drop(reason(error))
        graphs = load()
    program = OnnxProgram(NpuGraphs(graphs.__getitem__), opened)
    return StaticModel(program, opened.layout, config)


def _compile_into(work: Path, bundle: Bundle, opened: OpenedGraphs, device: NpuDevice) -> None:
    """Raises DeviceError."""
    compiled = {}
    for function, name in opened.files.items():
        path = str(bundle.file(name))
        try:
            compiled[function] = device.compile(path)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot compile {path} for the NPU: {reason(error)}", remedy=_ANOTHER
            ) from error
    _require_right(bundle, opened, compiled, device)
    for name, each in compiled.items():
        stream = BytesIO()
        try:
            each.export_model(stream)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot keep what it compiled for the NPU: {reason(error)}",
                remedy="Update openvino and the NPU's driver, or choose another --device.",
            ) from error
        (work / f"{name}.blob").write_bytes(stream.getvalue())


def _require_right(
    bundle: Bundle, opened: OpenedGraphs, compiled: Mapping[str, Any], device: NpuDevice
) -> None:
    """Compares a few scores with those of the CPU. Raises DeviceError."""

    def on_cpu(function: str) -> Any:
        path = str(bundle.file(opened.files[function]))
        return device.core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    engines = [NpuGraphs(compiled.__getitem__), NpuGraphs(on_cpu)]
    programs = [OnnxProgram(engine, opened) for engine in engines]
    models = [StaticModel(each, opened.layout, bundle.config) for each in programs]
    found, expected = (_scores(each) for each in models)
    difference = float(np.abs(found - expected).max() / expected.std())
    if not difference <= _TOLERANCE:  # also where there are NaN
        raise DeviceError(
            f"the NPU computes {bundle.path} wrong: scores are off by {difference:.2g} of their "
            "deviation",
            remedy="Update openvino and the NPU's driver, or choose another --device.",
        )


def _scores(model: StaticModel) -> np.ndarray:
    """Returns [rows, vocab] of a tree after a short prompt."""
    rows = min(len(_TREE), model.config.context_length, model.capabilities.max_rows)
    prompt = min(8, model.config.context_length - rows)
    random = np.random.RandomState(0)
    tokens = random.randint(0, model.config.vocab_size, prompt + rows).astype(np.int32)
    session: Session = model.open_session()
    try:
        session.prefill(tokens[:prompt].tolist())
        tree = TokenTree(
            tokens[prompt:], np.array(_TREE[:rows], np.int32), np.ones(rows, np.float32)
        )
        return session.forward(tree).logits
    finally:
        session.close()


class NpuGraphs:
    """compiled: returns OpenVINO's CompiledModel of a function, asked for when it is first run.

    The states of the session that ran last stay bound where they are; all else is copied into
    arrays of the request.
    """

    def __init__(self, compiled: Callable[[str], Any]) -> None:
        self._compiled = compiled
        self._requests: dict[str, _Request] = {}
        self._lock = Lock()  # sessions may be used by threads of their own

    def run(
        self, function: str, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> Mapping[str, np.ndarray]:
        """Raises SessionError for a pass that was interrupted, DeviceError where the NPU fails or
        is gone, as after a sleep."""
        with self._lock:
            try:
                if function not in self._requests:
                    self._requests[function] = _Request(self._compiled(function))
                return self._requests[function].run(inputs, interruption)
            except RuntimeError as error:  # OpenVINO's own are of no other class
                interruption.require_none()
                self._requests.pop(function, None)
                raise DeviceError(
                    f"the NPU failed to run {function}: {reason(error)}",
                    remedy="Ask again; if it stays, start again, or choose another --device.",
                ) from error


class _Request:
    """An infer request and the arrays that are bound to it."""

    def __init__(self, compiled: Any) -> None:
        self._tensor = import_openvino().Tensor
        self._request = compiled.create_infer_request()
        self._outputs = [value.any_name for value in compiled.outputs]
        self._bound: dict[str, np.ndarray] = {}

    def run(
        self, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> dict[str, np.ndarray]:
        """Returns copies: another session's pass writes the request's own."""
        for name, array in inputs.items():
            if name.startswith(PAST):
                if self._bound.get(name) is not array:
                    self._bind(name, array)
            elif name in self._bound:
                self._bound[name][...] = array
            else:
                self._bind(name, array.copy())
        with interruption.ended_by(self._request.cancel):
            self._request.start_async()
            self._request.wait()
        return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}

    def _bind(self, name: str, array: np.ndarray) -> None:
        self._request.set_tensor(name, self._tensor(array, shared_memory=True))
        self._bound[name] = array
