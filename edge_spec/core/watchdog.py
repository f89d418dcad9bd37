"""Passes in a separate thread, so that one that hangs does not block the text: a draft's always,
the target's if a time-out was set.

A hanging pass cannot be ended from outside. After a limit the caller gets a HungError, and the
session is not used again; its memory is lost until the pass ends, if ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar, cast

import numpy as np

from edge_spec.core import turns
from edge_spec.core.features import GivesFeatures, OnPrefilled, collects
from edge_spec.core.model import (
    Forward,
    Interruptible,
    Model,
    Restorable,
    Session,
    keep_place,
    place_before,
)
from edge_spec.core.session_errors import close_quietly
from edge_spec.core.tree import TokenTree
from edge_spec.errors import HungError

_Result = TypeVar("_Result")

LEAST_S = 2.0  # lower bound of a pass's limit
FIRST_S = 60.0  # limit of a width's first pass, when libraries prepare
TIMES = 50  # limit relative to the width's usual duration
_SLICES = 10  # parts in which a limit is waited for
_CHUNK = 256  # tokens of a prompt in one call, to bound its duration

_log = logging.getLogger(__name__)


class WatchedModel:
    """A model whose sessions give up on passes that hang.

    A pass's limit is `times` the usual duration of its width, at least `least_s`; for a width's
    first, `first_s`. remedy: of the HungError. `close` leaves the model open if a pass hangs.
    """

    def __init__(
        self,
        model: Model,
        least_s: float = LEAST_S,
        first_s: float = FIRST_S,
        times: float = TIMES,
        remedy: str = "Load the model again, with another draft.",
    ) -> None:
        self.capabilities = model.capabilities
        self.config = model.config
        self.watched = model
        self._limits = (least_s, first_s, times)
        self._remedy = remedy
        self._sessions: list[WatchedSession] = []
        self._lock = Lock()

    def open_session(self) -> Session:
        session = self.watched.open_session()
        kind = _Restorable if isinstance(session, Restorable) else WatchedSession
        if kind is _Restorable and isinstance(session, GivesFeatures):
            kind = _Featured
        watched = kind(session, *self._limits, self._remedy)
        with self._lock:
            self._sessions = [each for each in self._sessions if each.is_in_use]
            self._sessions.append(watched)
        return watched

    def close(self) -> None:
        if any(session.hangs for session in self._sessions):
            _log.warning("a model that hangs is not closed: its memory stays taken")
            return
        self.watched.close()


class WatchedSession:
    """Wraps a session. A pass that hangs raises HungError, and so does every later call."""

    def __init__(
        self, session: Session, least_s: float, first_s: float, times: float, remedy: str
    ) -> None:
        self._session = session
        self._least_s = least_s
        self._first_s = first_s
        self._times = times
        self._worker = _Worker(remedy)
        # by call and rows: passes, mean seconds
        self._usual: dict[tuple[str, int], tuple[int, float]] = {}
        self.is_in_use = True

    @property
    def hangs(self) -> bool:
        """Return whether an abandoned pass, or the close after it, still runs."""
        return self._worker.given_up is not None and self._worker.is_busy

    @property
    def length(self) -> int:
        return self._session.length

    def prefill(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), _CHUNK):
            read = partial(self._session.prefill, tokens[start : start + _CHUNK])
            self._watched(("prefill", _CHUNK), read)  # fewer tokens may take as long as a chunk

    def forward(self, tree: TokenTree) -> Forward:
        return self._watched(("forward", len(tree)), lambda: self._session.forward(tree))

    def commit(self, rows: Sequence[int]) -> None:
        self._worker.require_idle()
        self._session.commit(rows)

    def rollback(self, length: int) -> None:
        self._worker.require_idle()
        self._session.rollback(length)

    def keep_place(self) -> None:
        self._worker.require_idle()
        keep_place(self._session)

    def place_before(self, length: int) -> int:
        return place_before(self._session, length)

    def close(self) -> None:
        """Close after a pass that an interrupt left; an abandoned pass's thread closes the session
        when it ends."""
        try:
            self._worker.require_idle()
        except HungError:
            if self.hangs:
                self._worker.end(self._put_away)
                return
        self._worker.end()
        self._session.close()
        self.is_in_use = False

    def _put_away(self) -> None:
        close_quietly(self._session)
        self.is_in_use = False

    def _watched(self, kind: tuple[str, int], work: Callable[[], _Result]) -> _Result:
        count, usual_s = self._usual.get(kind, (0, 0.0))
        limit_s = max(self._least_s, self._times * usual_s) if count else self._first_s
        started = time.perf_counter()
        try:
            result = self._worker.call(work, limit_s)
        except HungError:
            if isinstance(self._session, Interruptible):
                self._session.interrupt()  # it may yet end and free the device
            raise
        taken_s = time.perf_counter() - started
        self._usual[kind] = count + 1, usual_s + (taken_s - usual_s) / (count + 1)
        return result


class _Restorable(WatchedSession):
    def state(self) -> dict[str, np.ndarray]:
        assert isinstance(self._session, Restorable)
        self._worker.require_idle()
        return self._session.state()

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        assert isinstance(self._session, Restorable)
        self._worker.require_idle()
        self._session.restore(state, length)


class _Featured(_Restorable):
    @property
    def collects(self) -> bool:
        return collects(self._session)

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """`on_prefilled` is called from another thread, while `prefill` waits for it."""
        assert isinstance(self._session, GivesFeatures)
        self._worker.require_idle()
        self._session.collect_features(layers, on_prefilled)


class _Worker:
    """A thread that does one thing at a time for another thread."""

    def __init__(self, remedy: str) -> None:
        self.given_up: str | None = None  # why no more work is accepted
        self._remedy = remedy
        self._thread: Thread | None = None
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._result: Any = None
        self._error: BaseException | None = None
        # The caller counts what began, this thread what ended, so an interrupted caller never takes
        # running work for finished.
        self._num_begun = self._num_ended = 0
        self._done = Lock()  # used as a signal: the fastest kind
        self._done.acquire()
        self._limit_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._num_ended != self._num_begun

    def call(self, work: Callable[[], _Result], limit_s: float) -> _Result:
        """Return or raise the work's outcome. Raises HungError after `limit_s`, and on later
        calls."""
        self.require_idle()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="edge-spec-pass", daemon=True)
            self._thread.start()
        self._done.acquire(blocking=False)  # left by an interrupt
        self._result = self._error = None  # likewise
        self._limit_s = limit_s
        self._num_begun += 1
        self._asked.put(work)
        self._wait()
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return cast(_Result, result)

    def require_idle(self) -> None:
        """Wait for work that an interrupt left. Raises HungError."""
        if self.given_up is not None:
            raise HungError(self.given_up, remedy=self._remedy)
        self._wait()

    def end(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after its current work and `last`. No call may follow."""
        if self._thread is None:
            return
        self._thread = None
        if last is not None:
            self._num_begun += 1
            self._asked.put(last)
        self._asked.put(None)

    def _wait(self) -> None:
        # While the process is stopped (Ctrl-Z, a debugger), the pass stops too; that ends only one
        # slice.
        num_waited = 0
        while num_waited < _SLICES:
            if not self.is_busy:
                return
            # The signal may be the previous pass's, given after its count.
            self._done.acquire(timeout=self._limit_s / _SLICES)
            num_waited += not self._waits_for_its_turn()
        if not self.is_busy:
            return
        self.given_up = f"a pass hung for {self._limit_s:.3g} s"
        self.require_idle()

    def _waits_for_its_turn(self) -> bool:
        return self._thread is not None and turns.is_waiting(self._thread.ident)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                self._result = work()
            except BaseException as error:
                self._error = error
            del work
            self._num_ended += 1
            if self._done.locked():  # nobody waits for abandoned work
                self._done.release()
        self._result = self._error = None
