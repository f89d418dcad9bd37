"""Runs compiled graphs of fixed shapes, one request a function, on arrays that stay bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.errors import DeviceError
from edge_spec.runtimes.openvino.library import import_openvino, last_line
from edge_spec.runtimes.static.interruption import Interruption
from edge_spec.runtimes.static.onnx_program import PAST


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
                    f"the NPU failed to run {function}: {last_line(error)}",
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
