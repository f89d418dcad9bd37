"""The growing list of a graph's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import NodeProto, helper

from edge_spec.exporters.onnx.initializers import Initializers

CONTRIB = "com.microsoft"


class NodeList:
    """Nodes in the order in which they run."""

    def __init__(self) -> None:
        self.protos: list[NodeProto] = []

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Appends a node and returns the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(op, list(inputs), names, names[0], domain=domain, **attributes)
        self.protos.append(node)
        return names[0]


class Nodes(NodeList):
    """Collects nodes of a graph whose weights are stored elsewhere."""

    def __init__(self, weights: Initializers) -> None:
        super().__init__()
        self.weights = weights
