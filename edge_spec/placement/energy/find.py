"""Which counter of this machine tells what it draws."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from edge_spec.core.energy import AnswerMeter, EnergyMeter, NoMeter, Turns
from edge_spec.placement.energy.battery import find_battery
from edge_spec.placement.energy.power_log import COMMAND
from edge_spec.placement.energy.rapl import find_rapl

SYSFS = Path("/sys")
ELSEWHERE = "the processor's counters leave out the device that it runs on"


def find_counters(sysfs: Path | None = None) -> EnergyMeter:
    """Returns the processor's own, fine enough for single passes. sysfs: another than this
    machine's."""
    sysfs = sysfs or SYSFS
    if not (sysfs / "class").is_dir():
        if sys.platform == "darwin":
            return NoMeter(
                f"macOS tells root alone: {COMMAND}, and edge-spec bench --power-log FILE"
            )
        return NoMeter("this system does not tell")
    found = find_rapl(sysfs)
    return NoMeter(found) if isinstance(found, str) else found


def find_meter(on_processor: bool, sysfs: Path | None = None) -> EnergyMeter:
    """Returns the finest there is, a battery where there is no other. on_processor: whether all
    models run there: other devices are part of what a battery gives, and of no counter of the
    processor."""
    found = find_counters(sysfs) if on_processor else NoMeter(ELSEWHERE)
    if not isinstance(found, NoMeter):
        return found
    return find_battery(sysfs or SYSFS, found.why) or found


@cache
def answer_meter(on_processor: bool) -> AnswerMeter:
    """Returns this process's, so that its answers know of each other."""
    return AnswerMeter(find_meter(on_processor), _turns())


@cache
def _turns() -> Turns:
    return Turns()
