"""The session of a model on a device with memory of its own, where keys and values stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnxruntime

from edge_spec.core.model import Forward, require_rollback
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.ort.device_memory import DeviceGraphs, DeviceMemory, Traffic
from edge_spec.runtimes.ort.device_passes import DeviceGraph, DevicePasses, translated
from edge_spec.runtimes.ort.device_place import shares_weights
from edge_spec.runtimes.ort.graph_loader import GraphLoader


class DeviceSession:
    """Commits and rollbacks of chains change its length alone; the rows of a tree's path are moved
    together on the device.

    It has no parts (partial.py): their graph would be there with weights of its own.
    """

    def __init__(self, passes: DevicePasses) -> None:
        self.length = 0
        self._passes = passes
        self._scored = 0  # rows of the last pass that can still be committed

    @property
    def traffic(self) -> Traffic:
        """Counts what crosses over to the device and back."""
        return self._passes.traffic

    def prefill(self, tokens: Sequence[int]) -> None:
        self._scored = 0
        for length in self._passes.prefill(tokens, self.length):
            self.length = length

    def forward(self, tree: TokenTree) -> Forward:
        self._scored = 0
        out = self._passes.score(tree, self.length)
        self._scored = len(tree)
        return out

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError for rows that the last pass did not score, or that are gone."""
        if not rows or rows[-1] >= self._scored:
            raise ValueError(f"rows {list(rows)} of a pass over {self._scored} cannot be kept")
        self._scored = 0
        with translated(len(rows), self.length):
            self._passes.cache.compact(self.length, rows)
        self.length += len(rows)

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self._scored = 0
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        with translated(0, self.length):
            return self._passes.cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._passes.cache.require(state, length)
        self._scored = 0
        with translated(0, length):
            self._passes.cache.restore(state, length)
        self.length = length

    def interrupt(self) -> None:
        self._passes.interrupt()

    def close(self) -> None:
        self._passes.close()


class DeviceSessions:
    """inference: of the model in the form of `loader`. Where that takes trees, and large weights
    can be shared (graph_forms.py), the form for chains alone is loaded beside it. Raises
    BundleError, DeviceError."""

    def __init__(self, loader: GraphLoader, inference: onnxruntime.InferenceSession) -> None:
        assert loader.place is not None
        self._place = loader.place
        self._config = loader.config
        self._trees = self._chains = DeviceGraph(inference)
        form = loader.form
        if form is not None and form.takes_trees and shares_weights(self._place, self._config):
            chains = replace(form, takes_trees=False)
            self._chains = DeviceGraph(loader.open_form(chains))
        self._copying = DeviceGraphs(loader.open_beside, self._trees.signature.cache)

    def open(self) -> DeviceSession:
        memory = DeviceMemory(self._place, self._copying)
        return DeviceSession(DevicePasses(self._trees, self._chains, self._config, memory))
