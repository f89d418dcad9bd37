"""A Core ML package as numpy runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.runtimes.mil.constants import Constants
from edge_spec.runtimes.mil.interpreter import Interpreted, State, interpret
from edge_spec.runtimes.static.layout import Signature


class NumpyProgram:
    """Functions are planned when they are first run, each once; equal weights are held once.

    load: gives a pymil Function by its name.
    """

    def __init__(self, signatures: Mapping[str, Signature], load: Callable[[str], Any]) -> None:
        self._states = next(iter(signatures.values())).states
        self._load = load
        self._constants = Constants()
        self._planned: dict[str, Interpreted] = {}
        self._lock = Lock()  # sessions may be used by threads of their own

    def make_state(self) -> State:
        return {name: np.zeros(shape, np.float32) for name, shape in self._states.items()}

    def predict(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State
    ) -> Mapping[str, np.ndarray]:
        """Raises UnsupportedModelError for operations that are not known, too."""
        with self._lock:
            if function not in self._planned:
                self._planned[function] = interpret(self._load(function), self._constants)
        return self._planned[function].run(inputs, state)

    def read_state(self, state: State, name: str) -> np.ndarray:
        return state[name].copy()

    def write_state(self, state: State, name: str, value: np.ndarray) -> None:
        state[name][...] = value
