"""Drafting for the next round while the target verifies this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event

from edge_spec.core.metrics import NoOverlap, RoundStats
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.overlap_trial import OverlapTrial


class OverlappedDrafting:
    """Lets drafters draft on, in one thread for all rounds, as long as a block runs.

    trial: says when; None: in every round. Drafters and what they share with the target's thread,
    the sampler above all, are used by one thread at a time: the block has to leave them alone.
    """

    def __init__(self, drafters: Sequence[Drafter], trial: OverlapTrial | None = None) -> None:
        self.was_ready = False  # whether draft tokens of this round were made in the one before
        self.why_not: NoOverlap | None = None  # that they go on in this round
        self.goes_on = False  # whether they do
        self._drafters = drafters
        self._trial = trial
        self._thread = ThreadPoolExecutor(1, "edge-spec-draft")
        self._running: Future[None] | None = None
        self._stopped = Event()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Ends when the block and at most one pass of a draft have. Raises what a drafter raised
        that is not guarded."""
        ready = self.begin_round()
        if not ready:
            yield
            return
        self._stopped.clear()
        self._running = self._thread.submit(self._anticipate, ready)
        try:
            yield
        finally:
            self._stop()

    def begin_round(self) -> Sequence[Drafter]:
        """Returns the drafters that are to draft on in this round."""
        ready = [drafter for drafter in self._drafters if drafter.anticipates]
        self.was_ready = any(drafter.was_ready for drafter in ready)
        self.why_not = self._trial.why_not if ready and self._trial is not None else None
        self.goes_on = bool(ready) and self.why_not is None
        return ready if self.goes_on else ()

    def observe(self, round_stats: RoundStats) -> None:
        if self._trial is not None:
            self._trial.observe(round_stats)

    def close(self) -> None:
        self._stopped.set()
        self._thread.shutdown()

    def _anticipate(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            drafter.anticipate(self._stopped.is_set)

    def _stop(self) -> None:
        assert self._running is not None
        try:
            self._stopped.set()
            self._running.result()
        except KeyboardInterrupt:
            wait([self._running])  # nobody may use the draft before its pass has ended
            raise
