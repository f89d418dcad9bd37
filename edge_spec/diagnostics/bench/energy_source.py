"""What tells the energy of a measurement: the machine's counters, or a log read after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from edge_spec.core.energy import Energy, EnergyMeter, average_power_w
from edge_spec.diagnostics.bench.energy import EnergySource, with_energy
from edge_spec.diagnostics.bench.measuring import BenchMeasurement
from edge_spec.errors import UsageError
from edge_spec.placement.energy.power_log import COMMAND, read_power_log

_IDLE_S = 3.0  # that the machine's idle draw is measured for


def require_power_log(path: Path) -> None:
    """Raises UsageError, before anything is measured, where there is none yet."""
    if not path.is_file():
        raise UsageError(
            f"there is no power log {path}", remedy=f"Begin it before, with {COMMAND}."
        )


class BenchEnergy:
    """Waits a moment for what the idle machine draws, before the measurement."""

    def __init__(
        self, meter: EnergyMeter, log: Path | None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """log: in the place of the meter."""
        self._log = log
        self._idle_from_s = time.time()
        if log is None:
            self._source = EnergySource(meter.name, *average_power_w(meter, _IDLE_S, sleep))
        else:
            sleep(_IDLE_S)
        self._idle_to_s = time.time()

    def told(self, measured: BenchMeasurement) -> tuple[BenchMeasurement, EnergySource]:
        """Returns the measurement with the energy of its runs. With a log that cannot be read it is
        not known; what was measured stays."""
        if self._log is None:
            return measured, self._source
        try:
            log = read_power_log(self._log)
        except UsageError as error:
            unknown = Energy(None, error.shown)
            told = with_energy(measured, lambda start_s, end_s: unknown)
            return told, EnergySource(str(self._log), None, error.shown)
        idle = log.between(self._idle_from_s, self._idle_to_s)
        idle_s = self._idle_to_s - self._idle_from_s
        idle_w = None if idle.joules is None else idle.joules / idle_s
        return with_energy(measured, log.between), EnergySource(log.name, idle_w, idle.why)
