"""Makes passes of several conversations ready, beside those that run."""

from __future__ import annotations

import logging
from threading import Lock, Thread

from edge_spec.core.model import Model
from edge_spec.core.shared_pass import SharesPasses
from edge_spec.exactness.lossless import Losslessness
from edge_spec.exactness.sharing import Sharing, Together, settle_sharing

_ANY_ROWS = 64  # of a shared pass, where widths need not agree
_ROWS_EACH = 4  # of a shared pass, that widths are looked for up to

_log = logging.getLogger(__name__)


class SharingSetup:
    """Knows how passes may be shared by now; finds out more in threads of its own, one at a time.

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

    @property
    def widest(self) -> int:
        """Rows of a shared pass, at most."""
        widths, most = self.sharing.widths, self._model.capabilities.verified_rows
        return widths[-1] if widths else min(_ANY_ROWS, most)

    def prepare_for(self, num_conversations: int) -> None:
        """Begins to make ready for that many, unless it has."""
        if num_conversations <= self._prepared_for or not isinstance(self._model, SharesPasses):
            return
        with self._lock:
            if num_conversations > self._prepared_for:
                self._prepared_for = num_conversations
                before = self._thread
                self._thread = Thread(
                    target=self._run, args=(num_conversations, before), daemon=True
                )
                self._thread.start()

    def settle(self) -> None:
        """Returns when nothing is being prepared."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, num_conversations: int, before: Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._prepare(num_conversations)
        except Exception as error:  # whatever the library raises: all goes on as before
            _log.info("shared passes are not made ready: %s", error)

    def _prepare(self, num_conversations: int) -> None:
        assert isinstance(self._model, SharesPasses)
        most = self._model.prepare_sharing(num_conversations)
        rows = _ROWS_EACH * min(num_conversations, most)
        rows = min(rows, self._model.capabilities.verified_rows)
        if most > 1 and (self.most < 2 or (self._widths and rows > self.widest)):
            found = settle_sharing(self._model, self._widths, self._together, rows)
            if found is None and self.most < 2:
                _log.info("passes are not shared: that would change texts on this machine")
                return
            if found is not None and (self.most < 2 or found.widths[-1] > self.widest):
                self.sharing = found
        self.most = most
