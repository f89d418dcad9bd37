"""The drafter interface: anything that drafts tokens cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict

GREEDY = Sampler(SamplingParams(), ())


class Budget(NamedTuple):
    """Limits of one round."""

    num_draft_tokens: int  # draft tokens that can still become part of the text
    num_rows: int  # rows that fit one pass, including the pending token's
    # Whether draft tokens may branch. If not, only a chain can be accepted, and samples must form
    # one.
    branches: bool = True
    probes: bool = True  # whether rows off that chain may be scored for drafters to learn from
    min_reach: float = 0.0  # do not grow from rows less likely to be reached and right
    # Rows less likely than this are not worth scoring; None: `min_reach`. Lower if a row's children
    # cost a pass of a model, since siblings come free.
    least_reach: float | None = None
    free_rows: int = 1  # rows that cost no more than the pending one alone
    shape: tuple[int, ...] = ()  # parents of the rows of a tree for samples to fill, if known

    @property
    def worth_scoring(self) -> float:
        return self.min_reach if self.least_reach is None else self.least_reach


class Cost(Enum):
    """What making draft tokens takes."""

    LOOKUP = "lookup"  # next to nothing: found in texts and tables
    PASS = "pass"  # passes of a model, or of a part of one


@dataclass(frozen=True)
class DrafterTraits:
    """What a drafter costs and needs, known before it is made."""

    cost: Cost = Cost.LOOKUP
    samples: bool = False  # may propose sampled tokens
    trees: bool = False  # draft tokens may branch; a target limited to chains gets the best one
    auto: bool = False  # "auto" chooses it: see `factory.auto_drafters`
    auto_rows: int = 1  # rows of a pass that must be cheap on this machine for "auto" to choose it
    remembers: bool = False  # keeps answers for later runs
    draft_model: bool = False  # needs a second model
    corpora: bool = False  # needs the user's texts
    target_session: bool = False  # needs the target's own session: `Drafter.attach`
    target_layers: bool = False  # needs a target that can run in part
    hidden_states: bool = False  # needs hidden states of the scored rows
    head: str = ""  # kind of trained head that it needs
    options: frozenset[str] = frozenset()  # options of `LoadOptions` that few drafters understand

    @property
    def needs_text_alone(self) -> bool:
        return not (
            self.draft_model
            or self.corpora
            or self.target_session
            or self.target_layers
            or self.hidden_states
            or bool(self.head)
        )

    @property
    def shares_tree(self) -> bool:
        """Return True if its draft tokens may join those of others in one tree."""
        return not (self.samples or self.draft_model)

    def uses(self, option: str) -> bool:
        """Return True if this option of `LoadOptions` is for such a drafter."""
        needs = {"draft": self.draft_model, "head": bool(self.head), "corpora": self.corpora}
        needs |= {"remember": self.remembers}
        return option in self.options or needs.get(option, False)


_DRAFT_MODEL = DrafterTraits(trees=True, cost=Cost.PASS, samples=True, draft_model=True)
_PART = DrafterTraits(cost=Cost.PASS, samples=True, target_session=True, target_layers=True)
# This package's drafters, whose modules are imported when first used.
TRAITS: Mapping[str, DrafterTraits] = {
    "suffix": DrafterTraits(auto=True),
    "recycling": DrafterTraits(trees=True, auto=True, auto_rows=8),
    "corpus": DrafterTraits(auto=True, corpora=True),
    "answers": DrafterTraits(remembers=True),
    "lookahead": DrafterTraits(trees=True, options=frozenset({"lookahead"})),
    "jacobi": DrafterTraits(options=frozenset({"jacobi"})),
    "draft-model": _DRAFT_MODEL,
    "cascade": replace(_DRAFT_MODEL, auto=True),
    "early-exit": replace(_PART, options=frozenset({"exit_layer"})),
    "layer-skip": _PART,
    "medusa": DrafterTraits(
        trees=True, cost=Cost.PASS, auto=True, hidden_states=True, head="medusa"
    ),
    "dflash": DrafterTraits(cost=Cost.PASS, auto=True, target_session=True, head="dflash"),
    "eagle": DrafterTraits(
        trees=True, cost=Cost.PASS, samples=True, auto=True, target_session=True, head="eagle"
    ),
    "assistant": DrafterTraits(
        trees=True,
        cost=Cost.PASS,
        samples=True,
        auto=True,
        target_session=True,
        hidden_states=True,
        head="assistant",
    ),
}


class Drafter:
    """Proposes draft tokens; verification alone decides the output. Only `propose` is required."""

    name: str
    traits: DrafterTraits = DrafterTraits()
    passes: int | None = None  # model passes of the last proposal; None: one per level
    # Acceptance that its training reported, by position, given that all before it were accepted;
    # may be empty.
    reported_acceptance: Sequence[float] = ()
    # Error of an earlier answer: the next `begin` must start without old state, or raise.
    fault: str | None = None

    def attach(self, model: Model, session: Session) -> None:
        """Receive the target's session, before the first `begin` and whenever it is replaced.
        Raises an EdgeSpecError if model and session lack what the drafter needs."""

    def prepare(self, prompt: Sequence[int]) -> None:
        """Read a prompt before `begin`, perhaps while the target reads it too."""

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Start a generation. prompt: ends with the pending token."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        """Return a tree below `pending`; a single row means no draft token."""
        raise NotImplementedError

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Learn the outcome of a round, whoever proposed its tree."""

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Take note, as fast as possible, of a round for which it was not asked."""
        self.observe(tree, out, verdict)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        """Return a copy of the state for a snapshot, with arrays of `edge_spec.core.model`'s
        STATE_TYPES.

        learnt_only: at most one array, with the acceptance of each kind of draft token and nothing
        of the texts; the next session may start with it.
        """
        return {}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load what `state` returned. Raises KeyError or ValueError for anything else."""

    def close(self) -> None:
        """Release resources, when the engine is closed or its drafters change."""

    @property
    def idle_reason(self) -> PlainReason | None:
        """Why it drafts nothing for the rest of the answer, or None."""
        return None

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        """Acceptance of a row's first, second, ... sampled child; empty if it does not sample."""
        return ()

    # Called between `propose` and `observe`, in another thread, while the target scores a tree.

    anticipates = False  # can draft ahead in this round
    was_ready = False  # the last proposal began with a token drafted ahead

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        """Draft ahead for likely outcomes, until `stopped()`, which is checked between passes. It
        proposes nothing and changes when draft tokens are made, not which."""


def continues(earlier: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return True if a prompt continues an earlier one: the chat's next turn, or the same question.
    A system message that two chats share does not count."""
    return 0 < len(earlier) <= len(prompt) and tuple(prompt[: len(earlier)]) == tuple(earlier)


def restored_prompt(tokens: np.ndarray) -> tuple[int, ...]:
    """Return the prompt in a snapshot. Raises ValueError for another kind of array."""
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise ValueError(f"a prompt of shape {tokens.shape} and type {tokens.dtype}")
    return tuple(tokens.tolist())


def named(name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}/{each}": array for each, array in state.items()}


def part_of(state: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return what was `named` so."""
    prefix = f"{name}/"
    own = {each: array for each, array in state.items() if each.startswith(prefix)}
    return {each.removeprefix(prefix): array for each, array in own.items()}
