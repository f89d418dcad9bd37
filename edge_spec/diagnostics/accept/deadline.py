"""How long a check may take: one that is slow ends by itself, and is told from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from edge_spec.core.model import Model
from edge_spec.testing.faults import Fault, FaultKind, FaultyModel

_Result = TypeVar("_Result")


class OutOfTimeError(Exception):
    """A check has had its time; what it has found until then counts."""


class Deadline:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._clock())

    def check(self) -> None:
        """Raises OutOfTimeError."""
        if self._clock() >= self._end:
            raise OutOfTimeError(f"it takes longer than the {self.seconds:.0f} s there are for it")

    def progress(self, what: str, fraction: float) -> None:
        """A `Progress` that ends long work. Raises OutOfTimeError."""
        self.check()


class TimedModel(FaultyModel):
    """Another model each of whose calls may be the last that there is time for. It closes it.

    trees: False hides that it takes branches.
    """

    def __init__(self, model: Model, deadline: Deadline, trees: bool = True) -> None:
        super().__init__(model, [_Timed(deadline)])
        self.capabilities = replace(model.capabilities, trees=trees and model.capabilities.trees)


class _Timed(Fault):
    """Before each call, looks whether there is time for it."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(FaultKind.RAISES, "any")
        self._deadline = deadline

    def around(self, call: str, work: Callable[[], _Result]) -> _Result:
        self._deadline.check()
        return work()
