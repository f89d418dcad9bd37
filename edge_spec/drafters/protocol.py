"""What a drafter is: anything that guesses tokens cheaply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.model import Forward
from edge_spec.tree import TokenTree, Verdict


@dataclass(frozen=True)
class Budget:
    """Limits of one round."""

    num_draft_tokens: int  # guesses that can still become part of the text
    num_rows: int  # rows that fit one pass, the pending one included


class Drafter(Protocol):
    """Guesses what follows. It never decides what is written: only verification does."""

    name: str

    def begin(self, prompt: Sequence[int]) -> None:
        """Starts a generation; `prompt` ends with the pending token."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        """A tree below `pending`, of one row where there is no guess."""

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Learns the outcome of a round, whoever proposed its tree."""
