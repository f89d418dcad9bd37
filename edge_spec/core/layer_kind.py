"""Describes what layers of one model have for themselves, where they are not all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.rope import Rope

_LARGEST_COUNT = 1 << 12  # of heads, or of their elements: several times what any model has
_LONGEST_WINDOW = 1 << 24
_LONGEST_CONVOLUTION = 64


class HeadSizes(NamedTuple):
    """Gives the sizes of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Rotation(NamedTuple):
    """Says how the heads of some layers are rotated: by which frequencies, how many elements."""

    rope: Rope
    size: int

    def tables(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, each [num_positions, size / 2] float32."""
        return self.rope.tables(num_positions, self.size)


@dataclass(frozen=True)
class LayerKind:
    """Says what the attention of some layers has for itself, or what these have in its place."""

    rope: Rope | None  # None: nothing is rotated (NoPE)
    window: int | None = None  # the last positions that a row sees, itself one; None: all
    # Rows that a short convolution takes in, itself one (Liquid AI 2025, LFM2); None: attention.
    convolution: int | None = None
    head_dim: int | None = None  # None: the model's
    num_kv_heads: int | None = None
    keys_as_values: bool = False  # values are what keys are before they are normed and rotated

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerKind:
        rope = values["rope"]
        return cls(**{**values, "rope": rope and Rope.from_dict(rope)})

    def to_dict(self) -> dict[str, Any]:
        """Leaves out what was not stated when there was nothing but a rope and a window."""
        values = asdict(self)
        for field in fields(self)[2:]:
            if values[field.name] == field.default:
                del values[field.name]
        return values

    def problem(self, sizes: HeadSizes, rotation: Rotation | None) -> str | None:
        """Returns why no model has such layers, with heads of these sizes, rotated so."""
        if self.window is not None and not 1 <= self.window <= _LONGEST_WINDOW:
            return "it has a window that no model has"
        taken = self.convolution
        if taken is not None and not 2 <= taken <= _LONGEST_CONVOLUTION:
            return f"its convolutions take in {taken} rows"
        if self.head_dim is None and self.num_kv_heads is None:
            return None
        if not all(1 <= count <= _LARGEST_COUNT for count in sizes):
            return f"it has layers with {sizes.num_kv_heads} heads of {sizes.head_dim} elements"
        if sizes.head_dim % 2 or sizes.num_heads % sizes.num_kv_heads:
            return (
                f"{sizes.num_heads} attention heads of {sizes.head_dim} do not share "
                f"{sizes.num_kv_heads} of keys and values"
            )
        if rotation is not None and rotation.size > sizes.head_dim:
            return f"it rotates {rotation.size} of the {sizes.head_dim} elements of a head"
        return None


@dataclass(frozen=True)
class LayerEmbeddings:
    """Says what each layer adds of the token itself: of a table with an embedding for each layer,
    and of what one matrix makes of the token's own embedding (Google 2025, Gemma 3n)."""

    size: int  # of the embedding of one layer
    scale: float  # of what the table has,
    projected_scale: float  # of what the matrix makes,
    sum_scale: float  # and of both together
