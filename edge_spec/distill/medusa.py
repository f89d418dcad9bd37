"""Medusa heads (Cai et al. 2024, Medusa-1) that share one part of the target's output matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from edge_spec.distill.trainee import Teacher, Tensor, as_arrays, likeliest, parameter
from edge_spec.distill.windows import Batch


class MedusaTrainee:
    """Head k is z + SiLU(A z + b), and begins as the target's own choice.

    The output matrix is the target's and stays as it is, so the heads alone are learnt.
    """

    def __init__(self, teacher: Teacher, num_heads: int) -> None:
        hidden = teacher.config.hidden_size
        self.num_positions = num_heads
        self.parameters: dict[str, Tensor] = {}
        self._teacher = teacher
        for head in range(num_heads):
            prefix = f"{head}.0.linear."
            self.parameters[prefix + "weight"] = parameter(np.zeros((hidden, hidden)))
            self.parameters[prefix + "bias"] = parameter(np.zeros(hidden))

    def scores(self, batch: Batch) -> list[Tensor]:
        width, anchors = batch.next_tokens.shape[1], torch.as_tensor(batch.anchors)
        states = torch.as_tensor(batch.states)[:, :width][anchors]
        products, output = self._teacher.products, self._teacher.matrix
        return [products.of(self._head(states, head), output) for head in range(self.num_positions)]

    def drafts(self, batch: Batch) -> np.ndarray:
        return likeliest(self.scores(batch), self._teacher.token_ids)

    def stored(self) -> dict[str, np.ndarray]:
        ids = self._teacher.token_ids
        return {
            **as_arrays(self.parameters),
            "lm_head.weight": self._teacher.output,
            "d2t": ids - np.arange(len(ids)),
        }

    def texts(self) -> Mapping[str, str]:
        return {}

    def description(self) -> dict[str, Any]:
        return {
            "medusa_num_heads": self.num_positions,
            "medusa_num_layers": 1,
            "hidden_size": self._teacher.config.hidden_size,
            "vocab_size": self._teacher.config.vocab_size,
        }

    def _head(self, states: Tensor, head: int) -> Tensor:
        prefix, products = f"{head}.0.linear.", self._teacher.products
        matrix = products.rounded(self.parameters[prefix + "weight"])
        inner = products.of(states, matrix) + self.parameters[prefix + "bias"]
        return states + torch.nn.functional.silu(inner)
