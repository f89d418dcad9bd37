"""What `edge-spec devices --model` makes of Core ML's plan, whose own objects are faked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.fitting.devices import FunctionPlacement
from edge_spec.runtimes.coreml.unit_plan import summarize


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


def test_operations_and_costs_are_counted_by_unit_and_fallbacks_named() -> None:
    (found,) = summarize(Plan({"rows_1": OPERATIONS}), "ane")
    assert found.function == "rows_1"
    assert found.operations == {"cpu": 3, "ane": 2, "gpu": 1, "unknown": 1}
    assert found.shares == pytest.approx({"ane": 0.625, "cpu": 0.3125, "gpu": 0.0625, "unknown": 0})
    assert found.fallbacks == {"gather": 2, "slice_update": 1}


def test_fallbacks_are_of_the_unit_that_was_asked_for() -> None:
    plan = Plan({"rows_1": OPERATIONS})
    assert summarize(plan, "gpu")[0].fallbacks == {"gather": 1, "cast": 1}
    assert summarize(plan, "all")[0].fallbacks == {}


def test_functions_come_by_name_and_one_without_costs_has_no_shares() -> None:
    found = summarize(
        Plan({"rows_8": OPERATIONS, "rows_1": [("ios17.add", None, (), None)]}), "ane"
    )
    assert [each.function for each in found] == ["rows_1", "rows_8"]
    assert found[0] == FunctionPlacement("rows_1", {"unknown": 1}, {}, {})


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that shows the plan above for any bundle."""
    monkeypatch.setattr("edge_spec.models.bundle.open_bundle", lambda path: path)
    monkeypatch.setattr(
        "edge_spec.fitting.devices.placements_of",
        lambda bundle: summarize(Plan({"rows_1": OPERATIONS}), "ane"),
    )
    return str(Path("some-bundle"))


def test_a_table_shows_them(placed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--model", placed]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "function"
    for text in ("cpu 3, ane 2", "ane 62.5%, cpu 31.2%", "gather 2, slice_update 1"):
        assert text in row


def test_json_has_them(placed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--model", placed, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["placements"]
    assert found["operations"]["ane"] == 2 and found["fallbacks"] == {
        "gather": 2,
        "slice_update": 1,
    }
