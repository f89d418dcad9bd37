"""Describes what a mixture of experts has for itself, as part of a model's description."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SWISH_SLOPE = 1.702  # of experts that are clamped (OpenAI 2025, gpt-oss)
LEAST_SUM = 1e-6  # is added to what normalized sigmoids of experts add up to


@dataclass(frozen=True)
class Experts:
    """Says how a mixture of experts weighs what its experts add, and what these have for
    themselves."""

    normalized: bool = True  # the weights of those that a token takes add up to 1
    biases: bool = False  # of the router and of all matrices
    # What gate and up are bound to. Then a gate's swish has SWISH_SLOPE, and up has 1 added.
    clamp: float | None = None
    # The weights are sigmoids of the router's scores, to which a bias of each expert is added where
    # experts are chosen, and only there (DeepSeek-AI 2024); else a softmax of them.
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0  # what the weights are multiplied with
    dense_layers: int = 0  # the first ones, each with one MLP in the place of experts,
    dense_size: int = 0  # of this size
    # Each layer has one MLP of `dense_size` as well, and what both add is summed. Each has norms of
    # its own of what it reads and adds, and so has the router, which reads the stream itself
    # (Google 2026, Gemma 4).
    beside_mlp: bool = False
    score_scale: float = 1.0  # what the router's scores are multiplied with
    expert_scales: bool = False  # each expert has a number that its weight is multiplied with

    def to_dict(self) -> dict[str, Any]:
        """Leaves out from `sigmoid` on what says nothing, as it was before there was that."""
        kept = ("normalized", "biases", "clamp")
        values, usual = asdict(self), asdict(Experts())
        return {name: each for name, each in values.items() if name in kept or each != usual[name]}
