"""What several engines use at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from edge_spec.core.model import Model
from edge_spec.engine.components import IdleWork


class SharedModels:
    """Models that whoever `acquire`s them may use until all have given them back: the last one
    closes them. Any thread may call."""

    def __init__(self, models: Sequence[Model], work: IdleWork | None = None) -> None:
        """work: on these models, ends before they are closed."""
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
            for model in self._models:
                model.close()
