"""What the sessions of a model share on a device with memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.ort.device_graphs import DeviceGraphs
from edge_spec.runtimes.ort.device_memory import DeviceMemory, Place
from edge_spec.runtimes.ort.device_passes import DeviceGraph, DevicePasses
from edge_spec.runtimes.ort.device_session import DeviceSession


class DeviceSessions:
    """open_graph: loads a serialized model where the model itself is. Raises what it raises."""

    def __init__(
        self,
        place: Place,
        inference: onnxruntime.InferenceSession,
        config: ModelConfig,
        open_graph: Callable[[bytes], Any],
    ) -> None:
        self._place = place
        self._config = config
        self._trees = self._chains = DeviceGraph(inference)
        self._copying = DeviceGraphs(open_graph, self._trees.cache)

    def open(self) -> DeviceSession:
        memory = DeviceMemory(self._place, self._copying)
        return DeviceSession(DevicePasses(self._trees, self._chains, self._config, memory))
