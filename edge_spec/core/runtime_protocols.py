"""Describes models of which several sessions share a pass, which a runtime may offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import TokenTree


class PassPart(NamedTuple):
    """One session's rows in a shared pass. is_scored: whether anybody reads their scores, which is
    not so for a slice of a prompt."""

    session: Session
    tree: TokenTree
    is_scored: bool = True


@runtime_checkable
class SharesPasses(Protocol):
    """A model that scores the trees of several of its sessions in one pass, which reads the weights
    of a matrix once for all rows (Yu et al. 2022, Orca: selective batching); attention stays that
    of each session."""

    def prepare_sharing(self, num_sessions: int) -> int:
        """Makes what passes of `num_sessions` sessions need; returns how many may share one, 1 for
        none: where memory is short, say. Takes long; any thread may call it, during passes too."""

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Returns the scores of each part and leaves its session as its own `forward` would. One
        thread at a time may call it, while other sessions make passes of their own. None of the
        sessions `collects_alone`.

        num_rows: that the pass is widened to; at least those of all parts. Beside rows that are not
        scored, others may come without hidden states. Where it raises, none of the sessions has a
        last forward to commit, and each may score its tree by itself.
        """


def forward_one_by_one(parts: Sequence[PassPart]) -> list[Forward]:
    """Returns what a shared pass gives, by passes of each session's own."""
    return [part.session.forward(part.tree) for part in parts]
