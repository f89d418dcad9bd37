"""The graph of a model that also gives features (`edge_spec.core.features`), as further outputs.

Made from the graph of exporters/onnx/graph.py when a session first asks, over the same file of
weights: residual streams are there under the exporter's names, and are merely given out.

    feature.N            [1, rows, hidden_size]   the residual stream that enters layer N
    feature.num_layers   [rows, hidden_size]      after the final norm: of all rows, not only of
                                                  those that reach the head

An output that is not bound to a buffer is not copied anywhere, so that passes which want none run
at the pace of the graph without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, NodeProto, TensorProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.errors import BundleError
from edge_spec.runtimes.ort.signature import bind_output

_EMBEDDED, _HIDDEN = "embedded", "hidden"  # as the exporter calls them


def feature_name(layer: int) -> str:
    """Returns the name of the output that gives a layer's features."""
    return f"feature.{layer}"


def feature_graph(path: Path, config: ModelConfig, layers: Iterable[int]) -> bytes:
    """Returns a serialized ModelProto that refers to the same file of weights.

    Raises BundleError for a graph whose streams have other names than the exporter gives them now.
    """
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    for layer in sorted(layers):
        name = feature_name(layer)
        shape: list[int | str] = ["rows", config.hidden_size]
        if layer == config.num_layers:
            node = _final_norm(graph, path, name)
        else:
            node, shape = _stream(graph, path, layer, name), [1, *shape]
        graph.node.append(node)
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return bytes(model.SerializeToString())


class FeatureBuffers:
    """Holds the features of passes of one width."""

    def __init__(self, layers: Sequence[int], rows: int, hidden_size: int) -> None:
        self._layers = layers
        self._values = np.empty((len(layers), 1, rows, hidden_size), np.float32)
        self.rows = self._values[:, 0].swapaxes(0, 1)  # [rows, features, hidden_size]

    def bind(self, binding: onnxruntime.IOBinding, num_layers: int) -> None:
        for layer, values in zip(self._layers, self._values, strict=True):
            buffer = values[0] if layer == num_layers else values
            bind_output(binding, feature_name(layer), buffer)


def _stream(graph: GraphProto, path: Path, layer: int, name: str) -> NodeProto:
    """Returns what gives out the residual stream that enters a layer."""
    source = f"model.layers.{layer}.input_layernorm.sum" if layer else _EMBEDDED
    if not any(source in node.output for node in graph.node):
        raise _unknown(path, source)
    return helper.make_node("Identity", [source], [name], name)


def _final_norm(graph: GraphProto, path: Path, name: str) -> NodeProto:
    """The node that makes "hidden" of the rows that reach the head, for all rows."""
    made_by = {output: node for node in graph.node for output in node.output}
    norm = made_by.get(_HIDDEN)
    picked = [] if norm is None else [made_by.get(each) for each in norm.input[:2]]
    if norm is None or any(each is None or each.op_type != "Gather" for each in picked):
        raise _unknown(path, _HIDDEN)
    node = NodeProto()
    node.CopyFrom(norm)
    node.name = name
    node.input[:2] = [each.input[0] for each in picked if each is not None]
    node.output[:] = [name]
    return node


def _unknown(path: Path, name: str) -> BundleError:
    return BundleError(
        f"{path} has no {name} where features are expected", remedy="Export the model again."
    )
