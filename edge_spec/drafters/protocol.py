"""Defines a drafter: anything that drafts tokens cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict

GREEDY = Sampler(SamplingParams(), ())


@dataclass(frozen=True)
class Budget:
    """Limits of one round."""

    num_draft_tokens: int  # draft tokens that can still become part of the text
    num_rows: int  # rows that fit one pass, the pending one included
    # Whether draft tokens may branch: otherwise only a chain can be accepted, and samples must be
    # one.
    branches: bool = True
    probes: bool = True  # whether rows beside that chain may be scored for what they teach
    min_reach: float = 0.0  # rows less likely to be reached and right are not worth growing from,
    # and rows less likely than this are not worth scoring; None: the same. It is lower where what
    # may follow a row is found by a pass of a model: the siblings of a row come without one.
    least_reach: float | None = None
    free_rows: int = 1  # of the first ones, which cost no more than the pending one alone
    shape: tuple[int, ...] = ()  # parents of the rows of a tree that samples are to fill, if known

    @property
    def worth_scoring(self) -> float:
        return self.min_reach if self.least_reach is None else self.least_reach


class Cost(Enum):
    """Says what it takes to make draft tokens."""

    LOOKUP = "lookup"  # next to nothing: they are found in texts and tables
    PASS = "pass"  # passes of a model, or of a part of one


@dataclass(frozen=True)
class DrafterTraits:
    """Says what a drafter costs and needs. Nothing else is known of it before it is made."""

    cost: Cost = Cost.LOOKUP
    samples: bool = False  # it may propose tokens that were sampled
    trees: bool = False  # its draft tokens branch; a target that takes chains gets the best of them
    auto: bool = False  # "auto" chooses it: see `factory.auto_drafters`
    auto_rows: int = 1  # of a pass, which have to be cheap on this machine for "auto" to choose it
    remembers: bool = False  # it keeps answers for later runs
    draft_model: bool = False  # it needs a second model
    corpora: bool = False  # it needs texts of the user's
    target_session: bool = False  # it needs the target's own session: `Drafter.attach`
    target_layers: bool = False  # it needs a target that can be run in part
    hidden_states: bool = False  # it needs the hidden states of the rows that are scored
    head: str = ""  # the kind of trained head that it needs
    options: frozenset[str] = frozenset()  # of `LoadOptions`, that few drafters understand

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
        """Says whether its draft tokens may join those of others in one tree."""
        return not (self.samples or self.draft_model)

    def uses(self, option: str) -> bool:
        """Says whether this option of `LoadOptions` is for such a drafter."""
        needs = {"draft": self.draft_model, "head": bool(self.head), "corpora": self.corpora}
        needs |= {"remember": self.remembers}
        return option in self.options or needs.get(option, False)


_DRAFT_MODEL = DrafterTraits(trees=True, cost=Cost.PASS, samples=True, draft_model=True)
_PART = DrafterTraits(cost=Cost.PASS, samples=True, target_session=True, target_layers=True)
# Of the drafters of this package, whose modules are imported when one of them is made.
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
    """Drafts what follows; verification alone decides what is written. Only `propose` has to be
    written."""

    name: str
    traits: DrafterTraits = DrafterTraits()
    passes: int | None = None  # of its model that the last proposal took; None: one for each level
    # How often its draft tokens were right where it was made, by position, each after all before
    # it; empty where nobody has reported it.
    reported_acceptance: Sequence[float] = ()
    # Why it failed in an answer before: the next `begin` has to do without anything from then, or
    # raises.
    fault: str | None = None

    def attach(self, model: Model, session: Session) -> None:
        """Gives the target's own session, before the first `begin` and whenever another takes its
        place. Raises an EdgeSpecError where the two do not offer what the drafter needs."""

    def prepare(self, prompt: Sequence[int]) -> None:
        """Reads a prompt before `begin`, perhaps while the target reads it too."""

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Starts a generation. prompt: ends with the pending token."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        """Makes a tree below `pending`, of one row where there is no draft token."""
        raise NotImplementedError

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Learns the outcome of a round, whoever proposed its tree."""

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Hears, in as little time as possible, of a round for which it was not asked."""
        self.observe(tree, out, verdict)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        """Copies what belongs to a snapshot of the conversation, of `edge_spec.core.model`'s
        STATE_TYPES. learnt_only: one array at most, which tells how often draft tokens of each kind
        were right and nothing of the texts: the next session may begin with it."""
        return {}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Takes over what `state` gave. Raises KeyError or ValueError for anything else."""

    def close(self) -> None:
        """Puts away what is open, when the engine is closed or drafts otherwise."""

    @property
    def idle_reason(self) -> PlainReason | None:
        """Why it drafts nothing for the rest of the answer, where that is so."""
        return None

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        """How often the first, second, ... sampled child of a row is accepted; empty
        where none are sampled."""
        return ()

    # Between `propose` and `observe`, on another thread, while the target scores a tree.

    anticipates = False  # whether there is something to go on from in this round
    was_ready = False  # whether the last proposal began with a draft token that was made meanwhile

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        """Drafts on for likely outcomes, until `stopped`, which is asked between two passes. It
        proposes nothing, and changes no draft token, only when it is made."""


def continues(earlier: Sequence[int], prompt: Sequence[int]) -> bool:
    """Says whether a prompt goes on where an earlier one stood: the next turn of the same chat, or
    the same question again. A system message that two chats share does not make them one."""
    return 0 < len(earlier) <= len(prompt) and tuple(prompt[: len(earlier)]) == tuple(earlier)


def restored_prompt(tokens: np.ndarray) -> tuple[int, ...]:
    """The prompt that a snapshot holds. Raises ValueError for an array that is none."""
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise ValueError(f"a prompt of shape {tokens.shape} and type {tokens.dtype}")
    return tuple(tokens.tolist())


def named(name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}/{each}": array for each, array in state.items()}


def part_of(state: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns what was `named` so."""
    prefix = f"{name}/"
    own = {each: array for each, array in state.items() if each.startswith(prefix)}
    return {each.removeprefix(prefix): array for each, array in own.items()}
