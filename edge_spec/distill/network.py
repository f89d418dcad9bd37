"""Pieces of decoder layers in PyTorch, which several kinds of drafters have in common."""

from __future__ import annotations

from typing import Any

import torch

from edge_spec.core.config import ModelConfig
from edge_spec.core.rope import Rope

Tensor = Any  # torch.Tensor: the library's types are not there where it is not installed


class Rotation:
    """Rotary positions of one model, halves paired (Su et al. 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        rope = Rope(config.rope_theta, config.rope_scaling)
        self._frequencies = torch.from_numpy(rope.frequencies(config.head_dim))
        self._magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., rows, head_dim]. positions: [..., rows]."""
        angles = positions[..., None] * self._frequencies
        cos = (angles.cos() * self._magnitude).float()
        sin = (angles.sin() * self._magnitude).float()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divides the last axis by its root mean square (Zhang & Sennrich 2019, RMSNorm)."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + epsilon) * weight
