"""Where Core ML means to run each operation of a compiled package: its MLComputePlan, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.coreml.units import ANE, KINDS, UNITS

UNKNOWN = "unknown"  # Core ML says nothing of constants, and of functions that it has not loaded


@dataclass(frozen=True)
class FunctionPlan:
    """Of one function, constants left out.

    shares: of the estimated cost, by unit; they add up to 1 where Core ML tells costs.
    fallbacks: operations by their kind that the Neural Engine could not take; empty where it is
    not asked to.
    """

    function: str
    operations: Mapping[str, int]  # by unit
    shares: Mapping[str, float]
    fallbacks: Mapping[str, int]


def read_plan(compiled: Path, unit: str) -> Any:
    """coremltools' MLComputePlan. Raises DeviceError where Core ML makes none."""
    coremltools = import_coremltools()
    from coremltools.models.compute_plan import MLComputePlan

    try:
        return MLComputePlan.load_from_path(str(compiled), coremltools.ComputeUnit[UNITS[unit]])
    except Exception as error:  # Core ML's, as RuntimeError; or coremltools'
        raise DeviceError(
            f"Core ML makes no plan for {compiled} on {unit}: {error}",
            remedy="Choose another --device.",
        ) from error


def summarize(plan: Any, unit: str) -> list[FunctionPlan]:
    """One for each function, in the order of their names. unit: what the plan was made for."""
    functions = plan.model_structure.program.functions
    return [_summary(plan, name, functions[name], unit) for name in sorted(functions)]


def _summary(plan: Any, name: str, function: Any, unit: str) -> FunctionPlan:
    operations: Counter[str] = Counter()
    costs: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        kind = operation.operator_name.rpartition(".")[2]  # such as "ios18.linear"
        if usage is None and (cost is None or kind.startswith("const")):
            continue
        chosen = UNKNOWN if usage is None else _unit(usage.preferred_compute_device)
        operations[chosen] += 1
        costs[chosen] += 0 if cost is None else cost.weight
        if unit == ANE and usage is not None:
            supported = {_unit(device) for device in usage.supported_compute_devices}
            fallbacks[kind] += ANE not in supported
    total = sum(costs.values())
    return FunctionPlan(
        name,
        dict(operations.most_common()),
        {each: cost / total for each, cost in costs.most_common()} if total else {},
        {kind: count for kind, count in fallbacks.most_common() if count},
    )


def _unit(device: Any) -> str:
    return KINDS.get(type(device).__name__, UNKNOWN)
