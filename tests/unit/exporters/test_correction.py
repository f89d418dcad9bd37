"""Weights that make up for changed inputs: nearer to the outputs of the exact ones."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.exporters import block_quantize
from edge_spec.exporters.block_quantize import importance, input_correction, quantize

ROWS, COLUMNS, TOKENS = 48, 64, 400


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, exact inputs that are correlated, and those that came of quantization: smaller in
    some directions than they should be, and noisy."""
    random = np.random.RandomState(0)
    mixing = random.standard_normal((COLUMNS, COLUMNS)) * np.exp(-np.arange(COLUMNS) / 10)
    exact = random.standard_normal((TOKENS, COLUMNS)) @ mixing
    drift = np.eye(COLUMNS) - 0.2 * mixing @ mixing.T / np.linalg.norm(mixing @ mixing.T, 2)
    inputs = exact @ drift + 0.1 * random.standard_normal(exact.shape)
    weights = random.standard_normal((ROWS, COLUMNS))
    return tuple(each.astype(np.float32) for each in (weights, exact, inputs))  # type: ignore[return-value]


def test_a_whole_correction_without_damping_is_least_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_quantize, "_DAMPING", 0.0)
    monkeypatch.setattr(block_quantize, "_PART", 1.0)
    weights, exact, inputs = arrays()
    found = input_correction(inputs, exact)
    assert found is not None
    expected, *_ = np.linalg.lstsq(inputs.astype(np.float64), exact @ weights.T, rcond=None)
    np.testing.assert_allclose(
        weights @ found, expected.T, atol=2e-3
    )  # squares lose half of float32


def test_corrected_weights_are_nearer_also_in_blocks() -> None:
    weights, exact, inputs = arrays()
    found = input_correction(inputs, exact)
    assert found is not None
    counts = importance(inputs)

    def error(stored: np.ndarray) -> float:
        return float(np.square(inputs @ stored.T - exact @ weights.T).sum())

    assert error(weights @ found) < 0.75 * error(weights)
    in_blocks = [
        quantize(each, 4, importance=counts).dequantize() for each in (weights, weights @ found)
    ]
    assert error(in_blocks[1]) < 0.8 * error(in_blocks[0])
