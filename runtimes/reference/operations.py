"""Computes what the reference transformer needs no weights for: attention and activations."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Heads(NamedTuple):
    """Holds what attention takes, each [heads, rows, head_dim]; groups of queries share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def mix(
    heads: Heads,
    mask: np.ndarray,
    divisor: float,
    cap: float | None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention; mask: [rows, positions] bool, which position each row attends to. Products
    of queries and keys are divided by `divisor` and capped where there is a cap. sinks: of each
    head, a score more, whose weight goes nowhere. bias: [heads, rows, positions], added."""
    queries, keys, values = heads
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    keys, values = keys[:, None], values[:, None]  # a group of query heads shares each
    scores = grouped @ keys.swapaxes(-1, -2) / np.float32(divisor)
    if cap is not None:
        scores = softcap(scores, cap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape)
    scores = np.where(mask, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    lost: np.ndarray | float = 0.0
    if sinks is not None:
        own = sinks.reshape(len(keys), -1, 1, 1)
        highest = np.maximum(highest, own)
        lost = np.exp(own - highest)
    weights = np.exp(scores - highest)
    weights /= weights.sum(axis=-1, keepdims=True) + lost
    mixed: np.ndarray = (weights @ values).reshape(queries.shape)
    return mixed


def softcap(scores: np.ndarray, cap: float) -> np.ndarray:
    """Keeps scores between -cap and cap (Gemma Team 2024, Gemma 2)."""
    capped: np.ndarray = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    return capped


def side_by_side(heads: np.ndarray) -> np.ndarray:
    """[heads, rows, head_dim] -> [rows, heads * head_dim]."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def swish(gate: np.ndarray, slope: float = 1.0) -> np.ndarray:
    sharpened = np.float32(slope) * np.clip(gate, -80 / slope, None)  # within float32
    activated: np.ndarray = gate / (1 + np.exp(-sharpened))
    return activated


def sigmoid(scores: np.ndarray) -> np.ndarray:
    shares: np.ndarray = 1 / (1 + np.exp(-np.clip(scores, -80, None)))  # within float32
    return shares


def gelu_tanh(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


def gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the error function itself."""
    inner = gate.astype(np.float64).ravel() / math.sqrt(2)
    error = np.fromiter(map(math.erf, inner), np.float64, inner.size).reshape(gate.shape)
    activated: np.ndarray = (0.5 * gate * (1 + error)).astype(np.float32)
    return activated


def _relu(x: np.ndarray) -> np.ndarray:
    activated: np.ndarray = np.maximum(x, np.float32(0))
    return activated


ACTIVATIONS = {"silu": swish, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": _relu}
