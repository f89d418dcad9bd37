"""Opens the sessions of a model on a device with memory of its own; they share its graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.ort.device_graphs import DeviceGraphs
from edge_spec.runtimes.ort.device_memory import DeviceMemory
from edge_spec.runtimes.ort.device_passes import DeviceGraph, DevicePasses
from edge_spec.runtimes.ort.device_place import Place, shares_weights
from edge_spec.runtimes.ort.device_session import DeviceSession
from edge_spec.runtimes.ort.graph_forms import GraphForm


class Weights(Protocol):
    """Loads graphs of one model where it is computed."""

    config: ModelConfig
    form: GraphForm | None
    place: Place | None

    def open_form(self, form: GraphForm) -> Any: ...

    def open_beside(self, graph: bytes) -> Any: ...


class DeviceSessions:
    """inference: of the model in the form of `weights`. Where that takes trees, and large weights
    can be shared (device_weights.py), the form for chains alone is loaded beside it. Raises
    BundleError, DeviceError."""

    def __init__(self, weights: Weights, inference: onnxruntime.InferenceSession) -> None:
        assert weights.place is not None
        self._place = weights.place
        self._config = weights.config
        self._trees = self._chains = DeviceGraph(inference)
        form = weights.form
        if form is not None and form.takes_trees and shares_weights(self._place, self._config):
            chains = replace(form, takes_trees=False)
            self._chains = DeviceGraph(weights.open_form(chains))
        self._copying = DeviceGraphs(weights.open_beside, self._trees.signature.cache)

    def open(self) -> DeviceSession:
        memory = DeviceMemory(self._place, self._copying)
        return DeviceSession(DevicePasses(self._trees, self._chains, self._config, memory))
