"""A graph once more, with fewer threads, for a machine that is busy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

from edge_spec.core.threads import ThreadGovernor
from edge_spec.errors import EdgeSpecError

_log = logging.getLogger(__name__)


class FewerThreads:
    """Loads a graph again with fewer threads, which onnxruntime cannot change, by a thread of its
    own when that is first wanted, where there is memory for a second copy of the packed weights.

    threads: of `inference`; None where others than the CPU compute. reopen: loads the
    graph with this number of threads. has_room: whether there is memory for it.
    """

    def __init__(
        self,
        threads: int | None,
        inference: Any,
        reopen: Callable[[int], Any],
        has_room: Callable[[], bool],
    ) -> None:
        self._threads = threads
        self._reopen = reopen
        self._has_room = has_room
        self._opened: dict[int, Any] = {}  # None: being opened, or not to be had
        self._lock = Lock()
        self._thread: Thread | None = None
        if threads is not None:
            self._opened[threads] = inference

    def governor(self) -> ThreadGovernor | None:
        """Returns a governor for one session; None where there are no fewer threads."""
        if self._threads is None or self._threads < 2:
            return None
        return ThreadGovernor(self._threads, steps=1, is_ready=self.is_ready)

    def is_ready(self, threads: int) -> bool:
        """Begins to open it where it is not."""
        with self._lock:
            if threads not in self._opened:
                self._opened[threads] = None
                if self._has_room():
                    self._thread = Thread(target=self._open, args=(threads,), daemon=True)
                    self._thread.start()
            return self._opened[threads] is not None

    def inference(self, threads: int) -> Any:
        """Returns the graph with this number of threads; None after `follow`, until it is ready."""
        return self._opened.get(threads)

    def follow(self, inference: Any) -> None:
        """Another graph is in its place from now on, which `reopen` loads, too."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._threads is not None:
            self._opened = {self._threads: inference}

    def close(self) -> None:
        """Returns when nothing is being opened."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        self._opened.clear()

    def _open(self, threads: int) -> None:
        try:
            self._opened[threads] = self._reopen(threads)
        except EdgeSpecError as error:  # the text goes on as before
            _log.info("not opened with fewer threads: %s", error)
