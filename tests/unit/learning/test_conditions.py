"""When a machine is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.learning.conditions import MOST_CELSIUS, MOST_S_A_DAY, Conditions


def machine(root: Path, supplies: dict[str, dict[str, str]], *celsius: float) -> Conditions:
    for name, values in supplies.items():
        for key, value in values.items():
            path = root / "power_supply" / name / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value + "\n")
    for index, each in enumerate(celsius):
        zone = root / "thermal" / f"thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(f"{each * 1000:.0f}\n")
    return Conditions(root)


BATTERY = {"type": "Battery", "status": "Not charging"}
MAINS = {"type": "Mains", "online": "1"}


@pytest.mark.parametrize(
    ("supplies", "reason"),
    [
        ({}, None),  # a machine without a battery
        ({"BAT0": BATTERY, "AC": MAINS}, None),
        ({"BAT0": BATTERY | {"status": "Charging"}}, None),
        ({"BAT0": BATTERY | {"status": "Full"}}, None),
        ({"BAT0": BATTERY | {"status": "Discharging"}, "AC": MAINS}, "battery"),
        ({"BAT0": BATTERY, "AC": MAINS | {"online": "0"}}, "not on mains"),
        ({"BAT0": BATTERY}, "not on mains"),  # one that says nothing of a supply
        ({"BAT0": BATTERY | {"status": "Discharging"}}, "battery"),  # battery only
        ({"mouse": BATTERY | {"status": "Discharging", "scope": "Device"}}, None),
    ],
)
def test_it_learns_on_mains_only(
    supplies: dict[str, dict[str, str]], reason: str | None, tmp_path: Path
) -> None:
    found = machine(tmp_path, supplies).why_not(0.0)
    assert found is None if reason is None else reason in (found or "")


def test_it_rests_while_the_machine_is_hot(tmp_path: Path) -> None:
    assert machine(tmp_path / "warm", {}, 30, MOST_CELSIUS - 1).why_not(0.0) is None
    hot = machine(tmp_path / "hot", {}, 30, MOST_CELSIUS + 1).why_not(0.0)
    assert hot is not None and f"{MOST_CELSIUS + 1:.0f} degrees" in hot


def test_a_sensor_that_says_nothing_is_passed_over(tmp_path: Path) -> None:
    conditions = machine(tmp_path, {}, 30)
    (tmp_path / "thermal" / "thermal_zone0" / "temp").write_text("")
    assert conditions.why_not(0.0) is None


def test_a_day_has_a_bound(tmp_path: Path) -> None:
    conditions = machine(tmp_path, {})
    assert conditions.why_not(MOST_S_A_DAY - 1) is None
    assert "for today" in (conditions.why_not(MOST_S_A_DAY) or "")
