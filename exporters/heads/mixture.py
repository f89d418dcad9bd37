"""The experts of a head in onnxruntime's operator for them, which reads those alone that rows take.

In these graphs no row's last bit matters, so that rows are not kept apart as those of models are
(exporters/onnx/experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from edge_spec.core.heads import FLOAT_BITS, HeadExperts, HeadMatrix
from edge_spec.exporters.block_quantize import BlockQuantized, quantize
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.nodes import CONTRIB

BLOCK = 32  # weights that share a scale


def add_mixture(
    graph: HeadGraph,
    matrices: Mapping[str, HeadMatrix],
    experts: HeadExperts,
    bits: int,
    x: str,
    prefix: str,
) -> str:
    """x: [1, rows, hidden], what router and experts read -> the same, what they add. matrices,
    bits: as `HeadGraph.multiply` has them; prefix: of the names of the layer's matrices."""
    router = np.concatenate([read() for read in matrices[prefix + "router"].parts])
    hidden = router.shape[1]
    flat = graph.weight("expert_rows_shape", np.array([-1, hidden]))
    rows = graph.add("Reshape", [x, flat], prefix + "rows")
    scores = graph.add(
        "Gemm", [rows, graph.weight(prefix + "router", router)], prefix + "scores", transB=1
    )
    up, down = (
        _stacked(
            graph,
            prefix + name,
            [matrices[f"{prefix}experts.{n}.{name}"] for n in range(experts.count)],
            bits,
        )
        for name in ("gate_up", "down")
    )
    attributes: dict[str, float] = {"activation_alpha": 1.0, "activation_beta": 0.0}
    if bits == FLOAT_BITS:
        inputs = [rows, scores, *up, "", *down, ""]
        attributes["normalize_routing_weights"] = 1
    else:
        inputs = [rows, scores, *up[:2], "", *down[:2], "", "", "", "", up[2], down[2]]
        attributes |= {"expert_weight_bits": bits, "block_size": BLOCK}
    mixed = graph.add(
        "MoE" if bits == FLOAT_BITS else "QMoE",
        inputs,
        prefix + "mixed_rows",
        domain=CONTRIB,
        k=experts.used,
        activation_type="swiglu",
        swiglu_fusion=1,
        **attributes,
    )
    whole = graph.weight("pass_shape", np.array([1, -1, hidden]))
    return graph.add("Reshape", [mixed, whole], prefix + "mixture")


def _stacked(graph: HeadGraph, name: str, matrices: Sequence[HeadMatrix], bits: int) -> list[str]:
    """Writes the matrices of all experts: one name of floats, else those of packed values, scales
    and zero points. The rows of gate and up take turns, as the operator reads them."""
    name += ".experts"
    if bits == FLOAT_BITS:
        graph.write(name, (_in_turns(each)[None] for each in matrices))
        return [name]
    made: list[BlockQuantized] = []

    def packed() -> Iterator[np.ndarray]:
        for each in matrices:
            stored = quantize(_in_turns(each), bits, BLOCK, symmetric=True)
            made.append(stored)
            yield stored.packed.reshape(1, len(stored.packed), -1)

    graph.write(name, packed())
    graph.write(name + ".scales", [np.stack([each.scales for each in made])])
    zeros = np.stack([each.stated_zero_points() for each in made])
    graph.write(name + ".zero_points", [zeros])
    return [name, name + ".scales", name + ".zero_points"]


def _in_turns(matrix: HeadMatrix) -> np.ndarray:
    """The parts of a matrix, of as many rows each: a row of each, then the next ones."""
    parts = [read() for read in matrix.parts]
    turns: np.ndarray = np.stack(parts, axis=1).reshape(-1, parts[0].shape[-1])
    return turns
