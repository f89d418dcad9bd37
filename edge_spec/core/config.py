"""The shape of a model of the Llama family, as exporters read it and runtimes need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# Architectures that every part of edge-spec knows: attention in all layers, a gated MLP.
LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM is "llama"


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies differ from theta ** (-2i / head_dim).

    `linear` divides all of them by `factor`; `llama3` divides only the slow ones and blends in
    between (Llama 3.1, "The Llama 3 Herd of Models", 2024, section 3.4.2); `factors` divides each
    by its own entry, as GGUF files store it.
    """

    kind: str  # "linear" | "llama3" | "factors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()

    def divisors(self, frequencies: np.ndarray) -> np.ndarray:
        """What each of the unscaled frequencies is divided by."""
        if self.kind == "linear":
            return np.full_like(frequencies, self.factor)
        if self.kind == "factors":
            return np.array(self.factors)
        turns = self.original_context_length * frequencies / (2 * np.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        divisors: np.ndarray = 1 / (smooth + (1 - smooth) / self.factor)
        return divisors


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one model; counts are of elements, lengths of tokens."""

    architecture: str  # of LLAMA_FAMILY, or one that only a runtime knows
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # a bias on the attention's output projection
    num_experts: int = 0  # of each layer; 0: one dense MLP
    experts_used: int = 0  # by each token

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises TypeError for missing or unknown keys."""
        scaling = values.get("rope_scaling")
        if scaling is not None:
            scaling = RopeScaling(**{**scaling, "factors": tuple(scaling.get("factors", ()))})
        return cls(**{**values, "rope_scaling": scaling})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Counts the parameters of its matrices, all experts included; norms and biases are few."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size * max(self.num_experts, 1)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings

    def rope_frequencies(self) -> np.ndarray:
        """[head_dim / 2] float64; radians a position for each rotated pair."""
        exponents = -np.arange(0, self.head_dim, 2) / self.head_dim
        frequencies: np.ndarray = np.power(self.rope_theta, exponents)
        if self.rope_scaling is not None:
            frequencies /= self.rope_scaling.divisors(frequencies)
        return frequencies

    def rope_tables(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, each [num_positions, head_dim / 2] float32."""
        angles = np.arange(num_positions)[:, None] * self.rope_frequencies()[None]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
