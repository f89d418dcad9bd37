"""The energy counters of Intel's and AMD's processors, as Linux shows them
(docs.kernel.org/power/powercap)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_spec.core.energy import Energy, ReadEnergy

_UJ = 1e-6
_MOST_W = 1000.0  # of one domain: no processor and no memory draws more
_STILL_S = 0.2  # a counter that works has moved after it; they move about every millisecond
REMEDY = (
    "only root may read it: as root, chgrp a group of yours on its energy_uj and chmod 440 it, "
    "best in a udev rule"
)


@dataclass(frozen=True)
class _Domain:
    """One counter. name: such as package-0; range_uj: from which it begins at 0 again."""

    name: str
    path: Path
    range_uj: int

    def read_uj(self) -> int:
        """Raises OSError, ValueError."""
        return _number(self.path / "energy_uj")

    def joules(self, before_uj: int, after_uj: int, seconds: float) -> float:
        """Raises ValueError where the counter cannot be right, or may have wrapped unseen."""
        drawn_uj = after_uj - before_uj
        if drawn_uj < 0:
            drawn_uj += self.range_uj
        if drawn_uj < 0 or drawn_uj * _UJ > _MOST_W * max(seconds, 0.01):
            raise ValueError(f"the counter {self.name} went backwards")
        if (drawn_uj + self.range_uj) * _UJ <= _MOST_W * seconds:
            raise ValueError(f"the counter {self.name} may have wrapped around in {seconds:.0f} s")
        if not drawn_uj and seconds > _STILL_S:
            raise ValueError(f"the counter {self.name} stands still")
        return drawn_uj * _UJ


@dataclass(frozen=True)
class Rapl:
    """The processor's packages and, where they are counted, the memory: neither screen, disks nor
    a graphics card are."""

    domains: tuple[_Domain, ...]
    clock: Callable[[], float] = time.monotonic

    @property
    def name(self) -> str:
        return f"RAPL ({', '.join(each.name for each in self.domains)})"

    def begin(self) -> ReadEnergy:
        start_s = self.clock()
        try:
            before = [each.read_uj() for each in self.domains]
        except (OSError, ValueError) as error:
            why = f"RAPL: {_told(error)}"
            return lambda: Energy(None, why)

        def read() -> Energy:
            try:
                after = [each.read_uj() for each in self.domains]
                seconds = self.clock() - start_s
                counted = zip(self.domains, before, after, strict=True)
                return Energy(sum(each.joules(old, new, seconds) for each, old, new in counted))
            except (OSError, ValueError) as error:
                return Energy(None, f"RAPL: {_told(error)}")

        return read


def find_rapl(sysfs: Path) -> Rapl | str:
    """Returns the reason, one line, where there is none or it cannot be read."""
    try:
        domains = _domains(sysfs / "class" / "powercap")
        for each in domains:
            each.read_uj()
    except PermissionError:  # since CVE-2020-8694
        return f"RAPL: {REMEDY}"
    except (OSError, ValueError) as error:
        return f"RAPL: {_told(error)}"
    if not any(each.name.startswith("package") for each in domains):
        return "no RAPL counters here"
    return Rapl(domains)


def _domains(powercap: Path) -> tuple[_Domain, ...]:
    """Those that do not count the same twice: cores are in their package, and `psys`, and the
    registers in memory, count a package again. Raises OSError, ValueError."""
    found = {}
    for path in sorted(powercap.glob("*rapl:*")):
        if "mmio" in path.name or not (path / "energy_uj").exists():
            continue
        name = (path / "name").read_text(encoding="ascii").strip()
        if name.startswith("package"):
            found[name] = _Domain(name, path, _number(path / "max_energy_range_uj"))
        elif name == "dram":  # as a package's part: one a package
            package = path.name.split(":")[1]
            found[f"dram-{package}"] = _Domain(
                f"dram-{package}", path, _number(path / "max_energy_range_uj")
            )
    return tuple(found.values())


def _number(path: Path) -> int:
    """Raises OSError, ValueError."""
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not text.isdecimal() or len(text) > 20:
        raise ValueError(f"{path.name} is no number")
    return int(text)


def _told(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return REMEDY
    if isinstance(error, OSError):
        return f"the counter cannot be read: {error.strerror}"
    return str(error)
