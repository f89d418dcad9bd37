"""Measures a profile while an engine has nothing to do, one pass at a time."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition, Lock, Thread
from typing import Protocol

from edge_spec.core.model import Model
from edge_spec.placement.measure import Effort, measuring
from edge_spec.placement.profile import Profile, ProfileKey, save_profile

_EFFORT = Effort(prefill_tokens=32)  # passes stay short: an answer may have to wait for one
_QUIET_S = 3.0  # after an answer, before the first pass: the next question may come at once

_log = logging.getLogger(__name__)


def profile_when_idle(model: Model, key: ProfileKey, branches: bool) -> IdleProfiler:
    """Started; it saves the profile once it is complete."""

    def save(profile: Profile) -> None:
        save_profile(key, replace(profile, branches=branches))

    profiler = IdleProfiler(partial(measuring, model, _EFFORT), save)
    profiler.start()
    return profiler


class _IdleWork(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class InTurns:
    """Works that share a model, of which each begins when those before it are done."""

    def __init__(self, works: Sequence[_IdleWork]) -> None:
        self._works = works

    def pause(self) -> None:
        for work in self._works:
            work.pause()

    def resume(self) -> None:
        for work in self._works:
            work.resume()

    def close(self) -> None:
        for work in reversed(self._works):
            work.close()


class IdleProfiler:
    """Starts `quiet_s` after the first answer, and rests while any is being written: an answer
    waits for one pass at most, in `pause`. `close` ends it; what was measured is then lost.

    measuring: makes the passes' generator, which returns the profile. save: is told it.
    """

    def __init__(
        self,
        measuring: Callable[[], Generator[float, None, Profile]],
        save: Callable[[Profile], None],
        quiet_s: float = _QUIET_S,
    ) -> None:
        self._measuring = measuring
        self._save = save
        self._quiet_s = quiet_s
        self._changed = Condition()
        self._passing = Lock()  # held during a pass
        self._num_answers = 0  # that are being written
        self._has_answered = False  # the first answer is not disturbed
        self._closed = False
        self._quiet = False  # since the last answer, for long enough
        self._thread = Thread(target=self.run, name="edge-spec-profile", daemon=True)

    def start(self) -> None:
        # A thread that is stopped within a library's call may take the process down with it.
        atexit.register(self.close)
        self._thread.start()

    def pause(self) -> None:
        """An answer begins; returns when no pass is running."""
        with self._changed:
            self._num_answers += 1
            self._quiet = False
            self._changed.notify_all()
        with self._passing:
            pass

    def resume(self) -> None:
        """That answer has ended."""
        with self._changed:
            self._num_answers -= 1
            self._has_answered, self._quiet = True, False
            self._changed.notify_all()

    def close(self) -> None:
        """Returns when the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    @property
    def is_done(self) -> bool:
        """Whether the profile is saved, or will never be."""
        return not self._thread.is_alive()

    def run(self) -> None:
        """What the thread does: returns when the profile is saved, or after `close`."""
        steps = self._measuring()
        try:
            try:
                while self._wait_until_quiet():
                    with self._passing:
                        if self._busy:  # an answer has begun just now
                            continue
                        next(steps)
            except StopIteration as end:
                self._save(end.value)
        except Exception as error:  # an answer does not fail for what was only a measurement
            _log.info("the model was not measured while it was idle: %s", error)
        finally:
            steps.close()

    @property
    def _busy(self) -> bool:
        return self._num_answers > 0 or not self._has_answered

    def _wait_until_quiet(self) -> bool:
        """False once it is closed."""
        with self._changed:
            while not (self._closed or self._quiet):
                if self._busy:
                    self._changed.wait()
                elif not self._changed.wait(self._quiet_s):
                    self._quiet = not self._busy
            return not self._closed
