"""Products of heads: by our own kernels where there are any, and exact where it decides."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto

from edge_spec.core.heads import HeadMatrix, StoredStep
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.graph import tensor
from edge_spec.runtimes.llamacpp.rows.install import VARIABLE
from edge_spec.runtimes.ort.heads import _opened

TOKENS, WIDTH = 400, 256


def opened(matrix: np.ndarray, bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """What scores states [rows, WIDTH] by a graph of nothing else, whose weights are in memory."""
    weights = io.BytesIO()
    graph = HeadGraph(weights)
    parts = tuple(lambda part=part: part for part in np.array_split(matrix, 3))
    graph.score("states", "head", HeadMatrix(parts, is_output=True), bits, "logits")
    model = graph.serialized(
        "head",
        [tensor("states", TensorProto.FLOAT, [1, "rows", WIDTH])],
        [tensor("logits", TensorProto.FLOAT, [1, "rows", TOKENS])],
    )
    session = _opened(StoredStep(model, weights.getvalue()), "a head", 2)
    return lambda states: session.run(["logits"], {"states": states[None]})[0][0]


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((TOKENS, WIDTH), np.float32), random.standard_normal(
        (5, WIDTH), np.float32
    )


@pytest.mark.parametrize("rows", ["on", "off"])
def test_the_likeliest_tokens_are_scored_again_in_8_bits(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, rows)
    matrix, states = drawn(0)
    expected = states @ matrix.T
    found, whole = opened(matrix, 4)(states), opened(matrix, 8)(states)
    best = np.argsort(expected, axis=1)[:, -8:]
    off = np.abs(found - expected)
    worst = np.take_along_axis(off, best, 1).max()
    assert worst <= 2.5 * np.take_along_axis(np.abs(whole - expected), best, 1).max()
    assert worst < np.median(off) < 0.2 * expected.std()
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("bits", [4, 8])
def test_heads_in_memory_do_not_share_what_has_the_same_name(bits: int) -> None:
    matrices, states = [drawn(seed)[0] for seed in (1, 2)], drawn(3)[1]
    heads = [opened(matrix, bits) for matrix in matrices]
    for head, matrix in zip(heads, matrices, strict=True):
        expected = states @ matrix.T
        np.testing.assert_allclose(head(states), expected, atol=0.5 * expected.std(), rtol=0)
