"""Describes what a model can tell of the devices that compute its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class TellsNodePlacement(Protocol):
    """A model whose library says which device took which of its operators."""

    def node_placement(self) -> Mapping[str, Mapping[str, int]]:
        """Counts operators, such as "MatMulNBits", by the provider that took them, such as
        "CUDAExecutionProvider"."""
