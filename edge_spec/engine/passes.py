"""The passes of a conversation: by itself, or together with those of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import TokenTree


class Scored(NamedTuple):
    """num_rows: that `out` should have. charged_s: what of a pass that others shared is this
    conversation's part, without the time that it waited for its turn; None where it need not.
    num_sharing: conversations in the pass. tree: what was scored of the one that was asked for,
    where that is not all of it."""

    out: Forward
    num_rows: int
    charged_s: float | None = None
    num_sharing: int = 1
    tree: TokenTree | None = None


class Passes(Protocol):
    """The way that passes over the target go."""

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        """Scores every row of the tree, at least; or its first ones, if it comes with `values` of
        its rows (`RoundPlan`). num_rows: of a pass of its own, if more."""

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Commits `tokens` without returning scores."""

    def settle(self) -> None:
        """Returns when nothing is done in the background."""


class OwnPasses:
    """Each pass is of one session."""

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        padded = tree.padded(num_rows)
        return Scored(session.forward(padded), len(padded))

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        session.prefill(tokens)

    def settle(self) -> None:
        pass
