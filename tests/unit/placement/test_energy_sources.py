"""Counters that wrap, vanish, stand still or are not to be read, a battery, and power logs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edge_spec.core.energy import NoMeter
from edge_spec.errors import UsageError
from edge_spec.placement.energy.battery import Battery, find_battery
from edge_spec.placement.energy.find import find_counters, find_meter
from edge_spec.placement.energy.power_log import read_power_log
from edge_spec.placement.energy.rapl import Rapl, find_rapl
from fixtures.power_tree import RANGE_UJ, PowerTree

RANGE_J = RANGE_UJ * 1e-6
START_S = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC).timestamp()


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def tree(tmp_path: Path) -> PowerTree:
    return PowerTree(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rapl(tree: PowerTree, clock: Clock) -> Rapl:
    found = find_rapl(tree.root)
    assert isinstance(found, Rapl)
    return replace(found, clock=clock)


def battery(tree: PowerTree, clock: Clock) -> Battery:
    found = find_battery(tree.root, "")
    assert found is not None
    return replace(found, clock=clock)


def test_packages_and_memories_are_added_and_nothing_is_counted_twice(
    tree: PowerTree, clock: Clock
) -> None:
    counters = [
        tree.add_counter("intel-rapl:0", "package-0", 10.0),
        tree.add_counter("intel-rapl:0:1", "dram", 20.0),
        tree.add_counter("intel-rapl:1", "package-1", 30.0),
        tree.add_counter("intel-rapl:0:0", "core"),
        tree.add_counter("intel-rapl:2", "psys"),
        tree.add_counter("intel-rapl-mmio:0", "package-0"),
    ]
    meter = rapl(tree, clock)
    assert meter.name == "RAPL (package-0, dram-0, package-1)"
    read = meter.begin()
    clock.now_s = 2.0
    for counter, joules in zip(counters, (15.0, 21.0, 32.0, 900.0, 900.0, 900.0), strict=True):
        tree.count(counter, joules)
    assert read().joules == pytest.approx(5 + 1 + 2)


def test_a_counter_that_wraps_around_goes_on(tree: PowerTree, clock: Clock) -> None:
    counter = tree.add_counter("intel-rapl:0", "package-0", RANGE_J - 3.0)
    read = rapl(tree, clock).begin()
    clock.now_s = 1.0
    tree.count(counter, RANGE_J + 4.0)
    assert read().joules == pytest.approx(7.0)


def test_what_a_counter_cannot_tell_is_not_known_with_one_line(
    tree: PowerTree, clock: Clock
) -> None:
    counter = tree.add_counter("intel-rapl:0", "package-0", 50.0)
    read = rapl(tree, clock).begin()

    def told() -> str:
        energy = read()
        assert energy.joules is None and "\n" not in energy.why
        return energy.why

    clock.now_s = 1.0
    assert told() == "RAPL: the counter package-0 stands still"
    tree.count(counter, 49.0)
    assert told() == "RAPL: the counter package-0 went backwards"
    tree.count(counter, 60.0)
    clock.now_s = RANGE_J / 1000.0 + 1.0  # in which 1 kW would have brought it around
    assert told() == "RAPL: the counter package-0 may have wrapped around in 263 s"
    counter.write_bytes(b"\xff\x00not a number\n")
    assert told() == "RAPL: energy_uj is no number"
    counter.unlink()
    assert "cannot be read: No such file" in told()
    assert find_rapl(tree.root) == "no RAPL counters here"


def test_a_counter_for_root_alone_has_its_remedy(tree: PowerTree) -> None:
    counter = tree.add_counter("intel-rapl:0", "package-0")
    if os.name == "nt" or os.geteuid() == 0:
        pytest.skip("root reads whatever it may not")
    counter.chmod(0)
    meter = find_meter(on_processor=True, sysfs=tree.root)
    assert isinstance(meter, NoMeter) and "udev rule" in meter.why and "\n" not in meter.why


def test_refused_counters_have_their_remedy(
    tree: PowerTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.add_counter("intel-rapl:0", "package-0")
    read_text = Path.read_text

    def refusing(path: Path, *arguments: str, **named: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", refusing)
    why = find_counters(tree.root).begin()().why
    assert "only root may read it" in why and "udev rule" in why


def test_other_devices_are_no_part_of_the_processor_s_counters(tree: PowerTree) -> None:
    tree.add_counter("intel-rapl:0", "package-0")
    assert isinstance(find_meter(on_processor=True, sysfs=tree.root), Rapl)
    meter = find_meter(on_processor=False, sysfs=tree.root)
    assert isinstance(meter, NoMeter) and "leave out the device" in meter.why
    tree.add_battery(status="Discharging", energy_now=1)
    assert isinstance(find_meter(on_processor=False, sysfs=tree.root), Battery)


@pytest.mark.parametrize(
    "files",
    [
        ({"energy_now": 50_000_000}, {"energy_now": 49_000_000}),
        (
            {"charge_now": 5_000_000, "voltage_now": 10_000_000},
            {"charge_now": 4_900_000, "voltage_now": 10_000_000},
        ),
    ],
)
def test_a_battery_that_is_discharged(
    tree: PowerTree, clock: Clock, files: tuple[dict[str, int], dict[str, int]]
) -> None:
    folder = tree.add_battery(status="Discharging", **files[0])
    read = battery(tree, clock).begin()
    clock.now_s = 100.0
    tree.set_battery(folder, **files[1])
    assert read().joules == pytest.approx(3600.0)  # 1 Wh
    clock.now_s = 30.0
    assert read().why == "battery: its counter is too coarse for so short a time"


def test_a_battery_that_is_charged_tells_nothing(tree: PowerTree, clock: Clock) -> None:
    folder = tree.add_battery(status="Discharging", energy_now=50_000_000)
    meter = battery(tree, clock)
    read = meter.begin()
    clock.now_s = 100.0
    tree.set_battery(folder, status="Charging", energy_now=40_000_000)
    assert read().why == "battery: it began to charge meanwhile"
    assert meter.begin()().why == "battery: it is not being discharged"
    tree.set_battery(folder, status="Discharging", energy_now=60_000_000)
    assert read().why == "battery: it was charged meanwhile"
    (folder / "energy_now").write_text("unknown")
    assert read().why == "battery: energy_now is no number"


def sample(second: int, milliwatts: int, elapsed_ms: float = 1000.0) -> str:
    return (
        f"*** Sampled system activity (Thu Jan  1 12:00:{second:02} 2026 +0000) "
        f"({elapsed_ms:.2f}ms elapsed) ***\n\n"
        f"CPU Power: {milliwatts - 10} mW\nGPU Power: 10 mW\nANE Power: 0 mW\n"
        f"Combined Power (CPU + GPU + ANE): {milliwatts} mW\n\n"
    )


def test_a_power_log_tells_the_energy_between_two_times(tmp_path: Path) -> None:
    path = tmp_path / "log"
    samples = [sample(second, 1000 if second <= 10 else 3000) for second in range(1, 21)]
    path.write_text("".join(["Machine model: Mac\n", *samples, "*** Sampled system act"]))
    log = read_power_log(path)
    # Ends lie within the seconds that are told: all half a second later is as likely as any.
    first_s = START_S + 0.5
    assert log.between(first_s + 6, first_s + 14).joules == pytest.approx(4 * 1.0 + 4 * 3.0)
    assert "covers 50%" in log.between(first_s + 16, first_s + 24).why
    assert "covers 0%" in log.between(first_s + 100, first_s + 110).why
    assert "shorter -i" in log.between(first_s + 5, first_s + 6).why


def test_samples_of_parts_of_a_second_tell_when_they_began(tmp_path: Path) -> None:
    """Their ends are told in whole seconds; here the first one began at 0.6 s."""
    path = tmp_path / "log"
    ends = [0.6 + 0.2 * count for count in range(1, 51)]
    path.write_text("".join(sample(int(end + 1e-9), 1000, 200.0) for end in ends))
    log = read_power_log(path)
    assert log.ends_s == pytest.approx([START_S + end for end in ends], abs=0.2)


@pytest.mark.parametrize("content", [b"", b"\0\1\2" * 100, b"<?xml version", b"no samples\n" * 9])
def test_what_is_no_power_log_is_refused_with_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="sudo powermetrics") as raised:
        read_power_log(path)
    assert "\n" not in raised.value.shown
