"""Counts which provider took which operators of a session's graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.models.devices import CPU
from edge_spec.runtimes.ort.devices import ProviderChoice

RECORDS_PLACEMENT = "session.record_ep_graph_assignment_info"  # "1", before the graph is loaded
_CPU_PROVIDER = "CPUExecutionProvider"
# What takes a model's time; a few nodes that compute shapes or look up rows are not worth a copy.
_HEAVY = (
    "Attention",
    "Gemm",
    "GroupQueryAttention",
    "MatMul",
    "MatMulNBits",
    "MoE",
    "MultiHeadAttention",
    "QMoE",
)


def count_nodes(inference: Any) -> dict[str, dict[str, int]]:
    """Counts the operators of an InferenceSession by the provider that took them."""
    counts: dict[str, Counter[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        found = counts.setdefault(part.ep_name, Counter())
        found.update(node.op_type for node in part.get_nodes())
    return {provider: dict(sorted(found.items())) for provider, found in counts.items()}


def heavy_on_cpu(placement: Mapping[str, Mapping[str, int]]) -> str:
    """Lists the operators on the CPU that take a model's time, such as "30 GroupQueryAttention, 121
    MatMulNBits"; empty where there is none."""
    found = placement.get(_CPU_PROVIDER, {})
    return ", ".join(f"{found[name]} {name}" for name in _HEAVY if name in found)


def require_on_device(inference: Any, chosen: Sequence[ProviderChoice]) -> None:
    """Raises DeviceError where another device than the CPU was asked for alone, and the CPU would
    compute attention or matrices."""
    if any(choice.kind == CPU for choice in chosen):
        return
    heavy = heavy_on_cpu(count_nodes(inference))
    if heavy:
        names = ",".join(choice.name for choice in chosen)
        raise DeviceError(
            f"onnxruntime would compute {heavy} of this model on the CPU, not on {names}",
            remedy=f"Choose another --device or --runtime, or allow it: --device {names},cpu",
        )
