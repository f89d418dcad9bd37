"""Rows of a mixture of experts do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.experts import MAX_SINGLE_ROWS
from edge_spec.models.bundle import Bundle

# What experts and their router read of a layer, by the family.
READ = {name: "post_attention_layernorm.output" for name in ("qwen3moe", "lfm2moe")}
READ["gemma4-experts"] = "post_attention_layernorm.sum"  # of which each takes a norm of its own


@pytest.fixture(scope="module", params=list(zip(READ, ("int4", "int8", "fp32"), strict=True)))
def experts(
    request: pytest.FixtureRequest,
    family: Callable[[str], StoredCheckpoint],
    family_bundle: Callable[..., Bundle],
) -> onnxruntime.InferenceSession:
    """The experts of one layer by themselves: [1, rows, hidden] -> the same."""
    name, bits = request.param
    checkpoint = family(name)
    model = onnx.load(str(family_bundle(name, bits).path / "model.onnx"))
    graph, prefix = model.graph, "model.layers.2."
    ends = prefix + READ[name], prefix + "mlp.mixture"
    needed, own = {ends[1]}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output) and node.output[0].startswith(prefix + "mlp."):
            needed.update(node.input, *read_within(node))
            own.insert(0, node)
    sizes = [1, "rows", checkpoint.config.hidden_size]
    values = [
        onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, sizes) for end in ends
    ]
    part = onnx.helper.make_graph(own, "experts", values[:1], values[1:], graph.initializer)
    del model.graph.node[:]
    model.graph.CopyFrom(part)
    return onnxruntime.InferenceSession(model.SerializeToString())


def read_within(node: onnx.NodeProto) -> list[list[str]]:
    """What the nodes of its branches read."""
    branches = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return [list(inner.input) for branch in branches for inner in branch.node]


def test_a_row_is_the_same_bit_for_bit_whatever_others_are_verified_with_it(
    experts: onnxruntime.InferenceSession,
) -> None:
    """Rows that share an expert would be one product, whose sums another number of rows orders
    otherwise."""
    (taken,) = experts.get_inputs()
    rows = np.random.RandomState(0).standard_normal((1, MAX_SINGLE_ROWS, 64)).astype(np.float32)
    (together,) = experts.run(None, {taken.name: rows})
    for row in range(MAX_SINGLE_ROWS):
        (alone,) = experts.run(None, {taken.name: rows[:, row : row + 1]})
        np.testing.assert_array_equal(alone[0, 0], together[0, row])
