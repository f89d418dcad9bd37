"""Says whether this machine may be used for learning now, by what the system (Linux) tells: on
mains only, not where it is hot, and for so long a day."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MOST_CELSIUS = 75.0
MOST_S_A_DAY = 1800.0  # of one core: at 10 W, 5 Wh
_SYSTEM = Path("/sys/class")
_MAINS = ("Mains", "USB")  # types of supplies


@dataclass(frozen=True)
class Conditions:
    """system: where the kernel describes its devices. today: the day, as the bound counts it."""

    system: Path = _SYSTEM
    today: Callable[[], str] = lambda: datetime.now(UTC).strftime("%Y-%m-%d")

    def why_not(self, spent_s: float) -> str | None:
        """Returns the reason in words; None where nothing is against it. spent_s: of a core,
        today."""
        if spent_s >= MOST_S_A_DAY:
            return f"it has had its {MOST_S_A_DAY / 60:.0f} minutes of a core for today"
        return self._on_battery() or self._too_hot()

    def _on_battery(self) -> str | None:
        """A machine with a battery has to say that it is on mains: by a supply that is online, or,
        where it lists none, by a battery that charges or is full."""
        supplies = list((self.system / "power_supply").glob("*"))
        batteries = [each for each in supplies if _is_battery(each)]
        if not batteries:
            return None
        if any(_read(each / "status") == "Discharging" for each in batteries):
            return "the machine runs on its battery"
        mains = [each for each in supplies if _read(each / "type") in _MAINS]
        if any(_read(each / "online") == "1" for each in mains):
            return None
        is_charged = any(_read(each / "status") in ("Charging", "Full") for each in batteries)
        return None if is_charged and not mains else "the machine is not on mains"

    def _too_hot(self) -> str | None:
        hottest = max(self._celsius(), default=0.0)
        if hottest < MOST_CELSIUS:
            return None
        return f"the machine is at {hottest:.0f} degrees Celsius, and {MOST_CELSIUS:.0f} is most"

    def _celsius(self) -> list[float]:
        found = []
        for zone in (self.system / "thermal").glob("thermal_zone*"):
            with suppress(ValueError):  # a sensor may say nothing
                found.append(int(_read(zone / "temp")) / 1e3)
        return found


def _is_battery(supply: Path) -> bool:
    """Leaves out the batteries of a mouse or a keyboard."""
    return _read(supply / "type") == "Battery" and _read(supply / "scope") != "Device"


def _read(path: Path) -> str:
    """ "" where there is no such file, or it cannot be read: a device may be taken out."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""
