"""A weight in the form in which its file stores it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from edge_spec.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A weight still in its file; `row_order` rearranges the stored rows into Hugging Face's."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray  # uint8 [..., row_bytes], a view of the mapped file
    row_order: np.ndarray | None = None

    def stored_rows(self) -> np.ndarray:
        """uint8 [..., row_bytes] in Hugging Face's row order."""
        if self.row_order is None:
            return self.data
        rows = self.data.reshape(self.shape[0], -1)  # a bias has one item a row
        ordered: np.ndarray = rows[self.row_order]
        return ordered

    def float32(self) -> np.ndarray:
        """The values, in `shape`. Raises UnsupportedModelError for a type gguf cannot read."""
        try:
            values = quants.dequantize(self.stored_rows(), self.kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"weights of type {self.kind.name} cannot be dequantized",
                remedy="Use a file in F16, Q8_0, Q4_0, Q4_1, Q5_x or a K-quant.",
            ) from None
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)
