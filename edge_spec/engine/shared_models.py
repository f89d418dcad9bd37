"""The models that several engines use at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from edge_spec.core.model import Model
from edge_spec.engine.components import IdleWork
from edge_spec.engine.passes import Passes


class SharedModels:
    """Models that whoever `acquire`s them may use until all have given them back: the last one
    closes them. Any thread may call."""

    def __init__(
        self, models: Sequence[Model], passes: Passes, work: IdleWork | None = None
    ) -> None:
        """passes: over the first of them. work: on these models, ends before they are closed."""
        self._passes = passes
        self._work = work
        self._models = models
        self._users = 0
        self._lock = Lock()

    def acquire(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            if self._work is not None:
                self._work.close()
            self._passes.settle()
            for model in self._models:
                model.close()
