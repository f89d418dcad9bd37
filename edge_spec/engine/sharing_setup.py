"""Makes passes of several conversations ready, beside those that run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock, Thread

from edge_spec.core.model import Model
from edge_spec.core.shared_pass import SharesPasses
from edge_spec.exactness.lossless import Losslessness
from edge_spec.exactness.sharing import Sharing, Together, settle_sharing

_ANY_ROWS = 64  # of a shared pass, where widths need not agree

_log = logging.getLogger(__name__)


class SharingSetup:
    """What shared passes may be by now; grows in threads of its own, one at a time.

    most: conversations that may share a pass, 1 for none. sharing: how, if they may.
    """

    def __init__(self, model: Model, lossless: Losslessness, together: Together) -> None:
        """together: makes a pass for two sessions of the setup's own, between those of others."""
        self.most = 1
        self.sharing = Sharing(lossless.widths, slices=False)
        self._model = model
        self._together = together
        self._widths = lossless.widths  # of passes of one conversation
        self._lock = Lock()
        self._thread: Thread | None = None
        self._prepared_for = 1
        self._widened_to = self.widest

    @property
    def widest(self) -> int:
        """Rows of a shared pass, at most."""
        widths, most = self.sharing.widths, self._model.capabilities.verified_rows
        return widths[-1] if widths else min(_ANY_ROWS, most)

    def prepare_for(self, num_conversations: int) -> None:
        """Begins to make ready for so many, unless it has."""
        if num_conversations <= self._prepared_for or not isinstance(self._model, SharesPasses):
            return
        with self._lock:
            if num_conversations > self._prepared_for:
                self._prepared_for = num_conversations
                self._start(lambda: self._prepare(num_conversations))

    def widen(self) -> None:
        """Begins to look for passes of twice as many rows, unless it has: conversations want
        them."""
        rows = min(2 * self.widest, self._model.capabilities.verified_rows)
        if rows <= self._widened_to or not self._widths:
            return
        with self._lock:
            if rows > self._widened_to:
                self._widened_to = rows
                self._start(lambda: self._widen(rows))

    def settle(self) -> None:
        """Returns when nothing is being prepared."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self, work: Callable[[], None]) -> None:
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception as error:  # whatever the library raises: all goes on as before
                _log.info("shared passes are not made ready: %s", error)

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def _prepare(self, num_conversations: int) -> None:
        assert isinstance(self._model, SharesPasses)
        most = self._model.prepare_sharing(num_conversations)
        if self.most < 2 <= most:
            found = settle_sharing(self._model, self._widths, self._together)
            if found is None:
                _log.info("passes are not shared: that would change texts on this machine")
                return
            self.sharing = found
        self.most = most

    def _widen(self, num_rows: int) -> None:
        found = settle_sharing(self._model, self._widths, self._together, num_rows)
        if found is not None and found.widths[-1] > self.widest:
            _log.info("conversations share passes of up to %d rows", found.widths[-1])
            self.sharing = found
