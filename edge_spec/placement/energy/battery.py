"""What a laptop's batteries give while they are discharged
(docs.kernel.org/power/power_supply_class)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_spec.core.energy import Energy, ReadEnergy

_J_PER_UWH = 3.6e-3
_J_PER_UAH_UV = 3.6e-9
# Batteries count in steps of some 10 mWh (36 J), every few seconds: ten of them are within 10 %.
_LEAST_S, _LEAST_J = 60.0, 360.0


class _NotDischargingError(Exception): ...


@dataclass(frozen=True)
class Battery:
    """The whole machine's draw, screen and all. Too coarse for less than a minute; what a battery
    says it gives at a moment (`power_now`) is an average over a time nobody knows, and not used.
    It may be begun while none is discharged: then nothing is known."""

    paths: tuple[Path, ...]
    instead_of: str = ""  # a finer counter: why it is not used
    clock: Callable[[], float] = time.monotonic

    @property
    def name(self) -> str:
        return f"battery ({', '.join(each.name for each in self.paths)})"

    def begin(self) -> ReadEnergy:
        start_s = self.clock()
        try:
            before_j = self._left_j()
        except (OSError, ValueError, _NotDischargingError) as error:
            why = _told(error)
            return lambda: self._unknown(why)

        def read() -> Energy:
            try:
                drawn_j = before_j - self._left_j()
            except _NotDischargingError:
                return self._unknown("battery: it began to charge meanwhile")
            except (OSError, ValueError) as error:
                return self._unknown(_told(error))
            if drawn_j < 0:
                return self._unknown("battery: it was charged meanwhile")
            if self.clock() - start_s < _LEAST_S or drawn_j < _LEAST_J:
                return self._unknown("battery: its counter is too coarse for so short a time")
            return Energy(drawn_j)

        return read

    def _unknown(self, why: str) -> Energy:
        return Energy(None, f"{self.instead_of}; {why}" if self.instead_of else why)

    def _left_j(self) -> float:
        """Raises OSError, ValueError, and _NotDischargingError where none gives or one is
        charged: of two, one may rest."""
        states = {_text(each / "status") for each in self.paths}
        if "Discharging" not in states or "Charging" in states:
            raise _NotDischargingError
        return sum(map(_left_j, self.paths))


def find_battery(sysfs: Path, instead_of: str) -> Battery | None:
    """Returns None where there is none."""
    paths = tuple(sorted((sysfs / "class" / "power_supply").glob("BAT*")))
    return Battery(paths, instead_of) if paths else None


def _left_j(path: Path) -> float:
    """Raises OSError, ValueError."""
    if (path / "energy_now").exists():
        return _number(path / "energy_now") * _J_PER_UWH
    return _number(path / "charge_now") * _number(path / "voltage_now") * _J_PER_UAH_UV


def _number(path: Path) -> int:
    text = _text(path)
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{path.name} is no number")
    return int(text)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()


def _told(error: Exception) -> str:
    if isinstance(error, _NotDischargingError):
        return "battery: it is not being discharged"
    if isinstance(error, OSError):
        return f"battery: it cannot be read: {error.strerror}"
    return f"battery: {error}"
