"""What `edge-spec devices --model` makes of Core ML's plan, whose own objects are faked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.runtimes.coreml.native import summarize


class MLCPUComputeDevice:
    """By their names, as coremltools has them."""


class MLGPUComputeDevice:
    pass


class MLNeuralEngineComputeDevice:
    pass


C, G, N = MLCPUComputeDevice(), MLGPUComputeDevice(), MLNeuralEngineComputeDevice()


class Plan:
    """MLComputePlan of functions whose operations are (kind, preferred, supported, cost); None for
    what Core ML does not tell."""

    def __init__(self, functions: dict[str, list[tuple[str, Any, Sequence[Any], Any]]]) -> None:
        program = {
            name: SimpleNamespace(
                block=SimpleNamespace(
                    operations=[
                        SimpleNamespace(operator_name=operation[0], told=operation)
                        for operation in operations
                    ]
                )
            )
            for name, operations in functions.items()
        }
        self.model_structure = SimpleNamespace(program=SimpleNamespace(functions=program))

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        _, preferred, supported, _ = operation.told
        if preferred is None:
            return None
        return SimpleNamespace(
            preferred_compute_device=preferred, supported_compute_devices=supported
        )

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        cost = operation.told[3]
        return None if cost is None else SimpleNamespace(weight=cost)


OPERATIONS: list[tuple[str, Any, Sequence[Any], Any]] = [
    ("const", None, (), None),
    ("ios18.constexpr_lut_to_dense", None, (), None),
    ("ios17.conv", N, (C, G, N), 0.25),
    ("ios17.conv", N, (C, G, N), 0.25),
    ("ios17.gather", C, (C, G), 0.125),
    ("ios17.gather", C, (C,), 0.125),
    ("ios17.cast", C, (C, N), None),
    ("ios18.slice_update", G, (G,), 0.05),
    ("ios18.read_state", None, (), None),
]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that shows the plan above for any bundle."""
    monkeypatch.setattr("edge_spec.models.bundle.open_bundle", lambda path: path)
    monkeypatch.setattr(
        "edge_spec.models.devices.placements_of",
        lambda bundle: summarize(Plan({"rows_1": OPERATIONS}), "ane"),
    )
    return str(Path("some-bundle"))


def test_a_table_shows_them(placed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--model", placed]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "function"
    for text in ("cpu 3, ane 2", "ane 62.5%, cpu 31.2%", "gather 2, slice_update 1"):
        assert text in row
