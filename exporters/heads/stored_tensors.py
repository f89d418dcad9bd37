"""The tensors of a head, left in their files until they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from edge_spec.exporters.stored_tensor import StoredTensor


class StoredTensors(Mapping[str, np.ndarray]):
    """Reads a tensor as float32 whenever it is asked for, and keeps none."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].float32()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
