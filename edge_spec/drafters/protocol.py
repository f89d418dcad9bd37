"""What a drafter is: anything that drafts tokens cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict


@dataclass(frozen=True)
class Budget:
    """Limits of one round."""

    num_draft_tokens: int  # draft tokens that can still become part of the text
    num_rows: int  # rows that fit one pass, the pending one included
    # Whether draft tokens may branch: otherwise only a chain can be accepted, and samples must be
    # one.
    branches: bool = True
    probes: bool = True  # whether rows beside that chain may be scored for what they teach
    min_reach: float = 0.0  # rows less likely to be reached and right are not worth growing from
    shape: tuple[int, ...] = ()  # parents of the rows of a tree that samples are to fill, if known


class Drafter(Protocol):
    """Drafts what follows. It never decides what is written: only verification does."""

    name: str

    def begin(self, prompt: Sequence[int]) -> None:
        """Starts a generation; `prompt` ends with the pending token."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        """A tree below `pending`, of one row where there is no draft token."""

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Learns the outcome of a round, whoever proposed its tree."""


@runtime_checkable
class ChoosingAlike(Protocol):
    """A drafter that drafts better when it knows how the target's tokens are chosen."""

    def choose_like(self, sampler: Sampler) -> None:
        """Before `begin`."""


@runtime_checkable
class Preparing(Protocol):
    """A drafter that has to read a prompt, which takes its time."""

    def prepare(self, prompt: Sequence[int]) -> None:
        """Before `begin`, perhaps while the target reads the prompt too."""


@runtime_checkable
class Branching(Protocol):
    """A drafter that can sample several children of a row."""

    def sibling_acceptance(self) -> Sequence[float]:
        """How often the first, second, ... child of a row is the one that is accepted; empty where
        it does not sample."""


@runtime_checkable
class Tentative(Drafter, Protocol):
    """A drafter that can draft after draft tokens, which may be taken back: a level of a
    cascade."""

    def assume(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Like `observe`, but the tokens are draft tokens too."""

    def retract(self, keep: int) -> None:
        """Forgets the tokens that were assumed, but for the first `keep`. `observe` forgets all."""


@runtime_checkable
class Attached(Protocol):
    """A drafter that reads its target's own cache."""

    def attach(self, model: Model, session: Session) -> None:
        """Before the first `begin`. Raises UsageError where they do not offer what it needs."""


@runtime_checkable
class Anticipating(Protocol):
    """A drafter that can go on drafting on another thread while the target scores a tree."""

    @property
    def anticipates(self) -> bool:
        """Whether it has something to go on from in this round."""

    @property
    def was_ready(self) -> bool:
        """Whether the last proposal began with a draft token that was made meanwhile."""

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        """Between `propose` and `observe`, for likely outcomes, until `stopped`, which is asked
        between two passes. Proposes nothing, and changes no draft token, only when it is made."""


class TextCounts(NamedTuple):
    """Draft tokens in a unit that drafts with different tokenizers share."""

    proposed_characters: int = 0  # of the rows that were verified
    accepted_characters: int = 0


@runtime_checkable
class CountingText(Protocol):
    """A drafter whose draft tokens are text. `text_counts` adds up over all generations."""

    @property
    def text_counts(self) -> TextCounts: ...


@runtime_checkable
class Keeping(Protocol):
    """A drafter whose state belongs to a snapshot of its conversation."""

    def snapshot(self) -> dict[str, np.ndarray]:
        """Copies, of the types that `edge_spec.engine.snapshot_file` writes."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises KeyError or ValueError for what is no snapshot of such a drafter."""


@runtime_checkable
class Learning(Protocol):
    """A drafter that learns how often draft tokens of each kind are right: the next session may
    begin with that. It tells nothing about the texts."""

    def learnt(self) -> dict[str, np.ndarray]:
        """Counts by name."""

    def relearn(self, counts: Mapping[str, np.ndarray]) -> None:
        """Takes over its own. Raises ValueError for what is of another version."""


@runtime_checkable
class Closing(Protocol):
    """A drafter that has something to put away when the engine is closed or drafts otherwise."""

    def close(self) -> None: ...
