"""What a runtime offers whose sessions can be scored together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import TokenTree


class PassPart(NamedTuple):
    """What one session has in a pass that several share."""

    session: Session
    tree: TokenTree
    scored: bool = True  # whether its scores are read: those of a prompt are not


@runtime_checkable
class SharesPasses(Protocol):
    """A model that scores the trees of several of its sessions in one pass over its weights.

    The weights of a matrix are read once for all rows, which is most of what a pass of a few rows
    takes (Yu et al. 2022, Orca: selective batching); attention stays that of each session.
    """

    def prepare_sharing(self, num_sessions: int) -> int:
        """Makes what passes of so many sessions need; returns how many may share one, 1 for none:
        where memory is short, say. Takes long, and any thread may call it, during passes too."""

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Leaves each session as its own `forward` would, with its scores, one thread at a time.

        num_rows: of the pass, which is widened to them; at least those of all parts. Of parts that
        are not scored the result has no rows. Where it raises, none of the sessions has a last
        forward to commit, and each may score its tree by itself.
        """


def forward_one_by_one(parts: Sequence[PassPart]) -> list[Forward]:
    """Returns what a shared pass gives, by passes of each session's own."""
    outs = [part.session.forward(part.tree) for part in parts]
    return [
        out if part.scored else Forward(out.logits[:0])
        for part, out in zip(parts, outs, strict=True)
    ]
