"""Declares what a session needs of the engine that runs a package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np


class Program(Protocol):
    """A package that is ready to run. A state is the cache of one session."""

    def make_state(self) -> Any:
        """A new state, all zeros."""

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: Any
    ) -> Mapping[str, np.ndarray]:
        """The function's outputs; writes the state. Raises SessionError."""

    def read_state(self, state: Any, name: str) -> np.ndarray: ...

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None: ...


@runtime_checkable
class InterruptibleProgram(Program, Protocol):
    """One whose engine can end a pass before its end."""

    def interrupt(self, state: Any) -> None:
        """Ends the pass on this state that runs, and any later one. Any thread may call."""
