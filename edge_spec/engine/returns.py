"""Predicts who comes again soon after a pass, so that the next one may wait for them."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from edge_spec.core.model import Session

_PATIENCE = 0.5  # of the last pass: without who is waited for, the next one takes nearly as long


class Returns:
    """Times of conversations' passes, in seconds on one clock."""

    def __init__(self) -> None:
        self._patience_s = 0.0
        self._left_s: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._soon: WeakSet[Session] = WeakSet()  # that came in time, the last time

    def observe(self, seconds: float) -> None:
        """Notes how long a pass took, which says how long the next one may wait."""
        self._patience_s = _PATIENCE * seconds

    def left(self, session: Session, now: float) -> None:
        """Notes that a conversation has had its pass."""
        self._left_s[session] = now

    def arrived(self, session: Session, now: float) -> None:
        """Notes that it wants another one."""
        left_s = self._left_s.pop(session, None)
        if left_s is None or now - left_s > self._patience_s:
            self._soon.discard(session)
        else:
            self._soon.add(session)

    def wait_s(self, now: float) -> float:
        """Returns how much longer to wait for those that are due; 0 where there are none."""
        due = [self._left_s[session] for session in self._soon if session in self._left_s]
        return max(0.0, max(due, default=now - self._patience_s) + self._patience_s - now)
