"""What the machine draws while an answer is written, as far as it tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

SHARED = "other answers were written meanwhile"


@dataclass(frozen=True)
class Energy:
    """What was drawn over an interval. joules: None where that is not known, for the reason `why`,
    one line."""

    joules: float | None
    why: str = ""


ReadEnergy = Callable[[], Energy]


class EnergyMeter(Protocol):
    """One of the machine's own counters. Any thread may use it."""

    @property
    def name(self) -> str:
        """What it counts, in words."""

    def begin(self) -> ReadEnergy:
        """Begins an interval, and returns what tells the energy from then to now, as often as it is
        asked. Neither raises: what cannot be read is not known."""


@dataclass(frozen=True)
class NoMeter:
    """A machine that does not tell. why: the reason, with its remedy where there is one."""

    why: str
    name: str = "not known"

    def begin(self) -> ReadEnergy:
        return lambda: Energy(None, self.why)


class Turns:
    """Who is writing on this machine, as far as this process knows. Any thread may use it."""

    def __init__(self) -> None:
        self.active = 0
        self.taken = 0  # by all answers so far
        self._lock = Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block, one answer more is being written."""
        with self._lock:
            self.active += 1
            self.taken += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1


@dataclass(frozen=True)
class AnswerMeter:
    """Measures answers, of which several may be written at the same time: the machine's counters
    cannot tell what each of them drew."""

    meter: EnergyMeter = NoMeter("nobody measures it")
    turns: Turns = field(default_factory=Turns)

    def open(self) -> AnswerEnergy:
        """Returns the meter of one answer."""
        return AnswerEnergy(self)


class AnswerEnergy:
    """What the machine draws from the beginning of one answer on. Used within its turns."""

    def __init__(self, meter: AnswerMeter) -> None:
        self._meter = meter.meter
        self._turns = meter.turns
        self._own_turns = 0
        self._read: ReadEnergy | None = None
        self._others_turns = 0
        self._is_shared = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block, this answer is being written."""
        self._own_turns += 1
        with self._turns.turn():
            yield

    def begin(self) -> None:
        self._others_turns = self._turns.taken - self._own_turns
        self._is_shared = self._turns.active > 1
        self._read = self._meter.begin()

    def read(self) -> Energy:
        """Returns the energy since `begin`; not known where other answers had a part in it."""
        if self._read is None:
            return Energy(None, "the answer did not begin")
        energy = self._read()
        if self._is_shared or self._turns.taken - self._own_turns != self._others_turns:
            return Energy(None, SHARED)
        return energy


def average_power_w(
    meter: EnergyMeter, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[float | None, str]:
    """Waits so long, and returns the watts that were drawn meanwhile, or None with the reason; at
    once where there is no meter."""
    if isinstance(meter, NoMeter):
        return None, meter.why
    read, start = meter.begin(), time.perf_counter()
    sleep(seconds)
    energy, taken_s = read(), time.perf_counter() - start
    return (None, energy.why) if energy.joules is None else (energy.joules / taken_s, "")
