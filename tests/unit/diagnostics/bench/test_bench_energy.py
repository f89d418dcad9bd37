"""Joules a token in the report of bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.core.energy import Energy, NoMeter
from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.energy import EnergySource, with_energy
from edge_spec.diagnostics.bench.energy_source import BenchEnergy, require_power_log
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    BenchMeasurement,
    BenchPlan,
    Run,
    Task,
)
from edge_spec.diagnostics.bench.report import document, markdown
from edge_spec.errors import UsageError
from edge_spec.text.prompt_files import Prompt

SETTINGS = {
    **dict.fromkeys(("model", "weights", "runtime", "drafter", "prompts"), "x"),
    "max_tokens": 8,
}
UNKNOWN = Energy(None, "RAPL: the counter package-0 went backwards")


def run(seconds: float, energy: Energy) -> Run:
    return Run((1,), 10, seconds, Stats(predicted_n=10), energy, ended_s=100.0)


def measurement(drafted: Energy, plain: Energy, last: Energy) -> BenchMeasurement:
    """Three passes over one prompt, the last of plain decoding with another energy."""
    task = Task(Prompt("a", "code", "x"), (1,))
    plan = BenchPlan([task], [], (2,), 8, 3, room=100)
    runs = {
        DRAFTING: [[run(1.0, drafted)] for _ in range(3)],
        PLAIN: [[run(2.0, plain)], [run(2.0, plain)], [run(2.0, last)]],
    }
    return BenchMeasurement(plan, runs, failures={}, partial=False)


def test_joules_a_token_are_medians_with_intervals_and_above_idle() -> None:
    measured = measurement(Energy(6.0), Energy(8.0), Energy(16.0))
    report = document(measured, SETTINGS, [], energy=EnergySource("RAPL (package-0)", 2.0))
    total = report["total"]
    assert (total["joules_per_token"], total["plain_joules_per_token"]) == (0.6, 0.8)
    assert total["energy_ratio"] == pytest.approx(6 / 8)
    assert total["energy_ratio_low"] == pytest.approx(6 / 16)
    assert total["plain_joules_per_token_high"] == pytest.approx(1.6)
    assert total["joules_above_idle_per_token"] == pytest.approx(0.6 - 2.0 * 0.1)
    assert total["plain_joules_above_idle_per_token"] == pytest.approx(0.8 - 2.0 * 0.2)
    page = markdown(report)
    assert "Energy by RAPL (package-0)" in page and "before the measurement: 2 W" in page
    assert "| all | 1 | 0.8 (0.8 to 1.6) | 0.6 (0.6 to 0.6) | 0.75 (" in page


def test_an_answer_of_which_it_is_not_known_leaves_its_prompt_out() -> None:
    measured = measurement(Energy(6.0), Energy(8.0), UNKNOWN)
    report = document(measured, SETTINGS, [], energy=EnergySource("RAPL (package-0)", 2.0))
    assert report["total"]["joules_per_token"] is None and report["total"]["energy_prompts"] == 0
    assert markdown(report).count(f"Energy: not known: {UNKNOWN.why}.") == 1


def test_a_log_tells_of_the_time_in_which_tokens_were_decoded() -> None:
    asked = []

    def between(start_s: float, end_s: float) -> Energy:
        asked.append((start_s, end_s))
        return Energy(1.0)

    told = with_energy(measurement(UNKNOWN, UNKNOWN, UNKNOWN), between)
    assert asked[:4] == [(99.0, 100.0)] * 3 + [(98.0, 100.0)]
    assert told.runs[PLAIN][0][0].energy == Energy(1.0)


def test_a_log_that_cannot_be_read_leaves_the_measurement_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(UsageError, match="there is no power log"):
        require_power_log(path)
    path.write_bytes(b"\0")
    source = BenchEnergy(NoMeter("no counters here"), path, sleep=lambda seconds: None)
    measured, energy = source.told(measurement(Energy(1.0), Energy(1.0), Energy(1.0)))
    report = document(measured, SETTINGS, [], energy=energy)
    assert report["energy"]["unknown"].startswith(f"the power log {path} is not")
    assert report["total"]["speedup"] == pytest.approx(2.0)
