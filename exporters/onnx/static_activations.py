"""Rounds what matrices of a static graph are multiplied with to 16 bits, as NPUs compute.

Every input of a matrix has one scale and one zero point for all of it, fixed beforehand by the
texts that weights are measured on. QuantizeLinear and DequantizeLinear stand before the product,
of which a compiler may make one operation of integers (Nagel et al. 2021, A White Paper on Neural
Network Quantization). With 8 bits, a few large values of some columns leave the others no levels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.static_weights import StaticWeights

_HEADROOM = 1.0  # of a range, on either side: other texts have larger values, and 16 bits have room
_MOST = np.iinfo(np.uint16).max


class RoundedInputs:
    """Static weights whose inputs are rounded.

    ranges: the least and the largest value of each matrix's inputs, by its name.
    """

    def __init__(self, matrices: StaticWeights, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._matrices = matrices
        self._ranges = ranges
        self._last: tuple[Nodes, str] | None = None  # that was rounded

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        return self._matrices.linear(nodes, self._rounded(nodes, x, name), name)

    def embed(self, nodes: Nodes, ids: str) -> str:
        return self._matrices.embed(nodes, ids)

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        self._matrices.head(nodes, self._rounded(nodes, hidden, name), name, output)

    def _rounded(self, nodes: Nodes, x: str, name: str) -> str:
        """Matrices that have one input follow each other, and share its two nodes."""
        widened = f"{x}.rounded"
        if self._last == (nodes, x):
            return widened
        self._last = (nodes, x)
        scale, zero = affine(*self._ranges[name])
        add = nodes.weights.add
        told = [add(f"{x}.scale", scale), add(f"{x}.zero", zero)]
        levels = nodes.add("QuantizeLinear", [x, *told], f"{x}.levels")
        return nodes.add("DequantizeLinear", [levels, *told], widened)


def affine(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale, float32, and the zero point, uint16, both without axes, of levels that
    cover the range and 0."""
    room = _HEADROOM * max(high - low, float(np.finfo(np.float32).tiny))
    low, high = min(0.0, low - room), max(0.0, high + room)
    scale = np.float32((high - low) / _MOST)
    return np.array(scale), np.array(np.clip(np.rint(-low / scale), 0, _MOST), np.uint16)
