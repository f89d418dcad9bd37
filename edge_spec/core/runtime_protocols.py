"""Models whose sessions can share a pass, optional for runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import TokenTree


class PassPart(NamedTuple):
    """One session's rows in a shared pass. is_scored: the logits are read; not so for a slice of a
    prompt."""

    session: Session
    tree: TokenTree
    is_scored: bool = True


@runtime_checkable
class SharesPasses(Protocol):
    """A model that scores several sessions' trees in one pass, reading each matrix once for all
    rows (Yu et al. 2022, Orca: selective batching). Each session attends to its own cache."""

    def prepare_sharing(self, num_sessions: int) -> int:
        """Prepare passes of `num_sessions` sessions, and return how many may share one (1: none, if
        memory is short). Slow; any thread may call it, even during passes."""

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Return each part's scores, and leave its session as its own `forward` would.

        One thread at a time may call it; other sessions may pass meanwhile. No session may satisfy
        `collects_alone`. num_rows: width to pad the pass to, at least the rows of all parts. If
        some rows are unscored, others may lack hidden states. If it raises, no session has a last
        forward, and each may score its tree by itself.
        """


def forward_one_by_one(parts: Sequence[PassPart]) -> list[Forward]:
    """Return a shared pass's result by one pass a session."""
    return [part.session.forward(part.tree) for part in parts]
