"""What is left of a plan, by what its stages may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from edge_spec.core.model import Progress


class Schedule:
    """Tells with every step how long the whole will take, at most about. stages: their seconds, in
    their order."""

    def __init__(
        self,
        progress: Progress,
        stages: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._left = dict(stages)
        self._stage_s = 0.0  # of the current stage
        self._begun_s = clock()

    def enter(self, stage: str) -> None:
        """The stages before this one are done, however long they took."""
        while stage in self._left:
            self._stage_s = self._left.pop(next(iter(self._left)))
        self._begun_s = self._clock()

    def __call__(self, what: str, fraction: float) -> None:
        here_s = max(0.0, self._stage_s - (self._clock() - self._begun_s))
        left_s = here_s + sum(self._left.values())
        self._progress(f"{what} (the plan takes about {left_s:.0f} s more)", fraction)
