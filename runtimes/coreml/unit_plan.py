"""Counts where Core ML means to run each operation of a compiled package, by its MLComputePlan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.fitting.devices import UNKNOWN, FunctionPlacement
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.coreml.units import ALL, CLASSES, UNITS


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


def summarize(plan: Any, unit: str) -> list[FunctionPlacement]:
    """One for each function, by name. plan: as coremltools has it, made for `unit`."""
    functions = plan.model_structure.program.functions
    return [_summary(plan, name, functions[name].block, unit) for name in sorted(functions)]


def _summary(plan: Any, name: str, block: Any, unit: str) -> FunctionPlacement:
    operations: Counter[str] = Counter()
    costs: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    for operation in block.operations:
        kind = operation.operator_name.rpartition(".")[2]  # of "ios18.linear"
        if kind.startswith("const"):  # constexpr operations, too
            continue
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        chosen = UNKNOWN if usage is None else _unit(usage.preferred_compute_device)
        operations[chosen] += 1
        costs[chosen] += 0 if cost is None else cost.weight
        if usage is not None and unit != ALL:
            fallbacks[kind] += unit not in map(_unit, usage.supported_compute_devices)
    total = sum(costs.values())
    return FunctionPlacement(
        function=name,
        operations=dict(operations.most_common()),
        shares={each: cost / total for each, cost in costs.most_common()} if total else {},
        fallbacks={kind: count for kind, count in fallbacks.most_common() if count},
    )


def _unit(device: Any) -> str:
    return CLASSES.get(type(device).__name__, UNKNOWN)
