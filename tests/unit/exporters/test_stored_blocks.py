"""Matrices in blocks, as a graph's nodes read them."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from edge_spec.core.heads import HeadMatrix
from edge_spec.exporters.block_quantize import quantize
from edge_spec.exporters.heads.step_graph import HeadGraph
from edge_spec.exporters.onnx.nodes import Initializers, Nodes


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def weights() -> Initializers:
    return Initializers(BytesIO())


def stored(weights: Initializers) -> dict[str, np.ndarray]:
    """Those that are small enough to be in the graph."""
    inline = (each for each in weights.protos if each.data_location != TensorProto.EXTERNAL)
    return {proto.name: numpy_helper.to_array(proto) for proto in inline}


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_each_expert_has_its_own_scales_and_zero_points(
    is_symmetric: bool, weights: Initializers
) -> None:
    experts = [
        quantize(np.abs(drawn(4, 64, seed=seed)), 4, symmetric=is_symmetric) for seed in range(3)
    ]
    names = Nodes(weights).store_experts("experts", experts)
    assert names == ["experts", "experts.scales", "experts.zero_points"]
    packed, scales, zeros = (stored(weights)[name] for name in names)
    for number, expert in enumerate(experts):
        np.testing.assert_array_equal(packed[number], expert.packed.reshape(4, -1))
        np.testing.assert_array_equal(scales[number], expert.scales)
        np.testing.assert_array_equal(zeros[number], expert.stated_zero_points())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bias_of_a_heads_matrix_is_added_to_what_blocks_give(
    bits: int, weights: Initializers
) -> None:
    rows, bias = drawn(6, 32), drawn(6, seed=1)
    matrix = HeadMatrix((lambda: rows[:2], lambda: rows[2:]), bias)
    graph = HeadGraph(weights, {"m": matrix}, bits)
    assert graph.multiply("x", "m") == "m.output"
    (node,) = graph.protos
    values = stored(weights)
    found = [values.get(name) for name in node.input]
    expected = quantize(rows, bits, symmetric=True)
    assert list(node.input[:1]) == ["x"] and list(node.input[3:5]) == ["", ""]
    np.testing.assert_array_equal(found[1], expected.packed)
    np.testing.assert_array_equal(found[2], expected.scales)
    np.testing.assert_array_equal(found[5], bias)
