"""Several drafters as one: their draft tokens in one tree, each row remembering who proposed it.

A draft token that another drafter contradicts is right less often than its own drafter says, one
that several make more often; how much is learnt, so that the merged tree's confidence is calibrated
too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict, chain_first
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import (
    Budget,
    Drafter,
    TextCounts,
    load_state_dicts,
    load_stats_into,
    state_dicts,
    stats_of,
)
from edge_spec.drafters.tree_builder import Growth, MergedRow, merge_rows, nothing, tree_of

_MEMBERS = {
    name: member
    for name, member in vars(Drafter).items()
    if not name.startswith("_") and (callable(member) or isinstance(member, property))
}
# Calls that return nothing, and go to all.
_CALLED = (
    *("attach", "attach_again", "use_sampler", "recover", "prepare", "begin"),
    *("observe", "skip"),
    *("extend_draft", "rollback_draft", "close"),
)


class DrafterWrapper(Drafter):
    """Passes every call on to another drafter through `_ask`, which a subclass may change.

    drafter: of any class; what it does not have is as in `Drafter`.
    """

    def __init__(self, drafter: Any) -> None:
        self.name = drafter.name
        self.traits = getattr(drafter, "traits", Drafter.traits)
        self._drafter = drafter

    def _ask(self, name: str, *given: Any) -> Any:
        """Returns what a method of the other drafter does, or the value of a property."""
        if not hasattr(self._drafter, name):
            return self._default(name, *given)
        found = getattr(self._drafter, name)
        return found if isinstance(_MEMBERS[name], property) else found(*given)

    def _default(self, name: str, *given: Any) -> Any:
        """Returns what a drafter says that has nothing of its own to say."""
        found = _MEMBERS[name].__get__(self)
        return found if isinstance(_MEMBERS[name], property) else found(*given)


class DrafterGroup(Drafter):
    """Several drafters, which all hear the same."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def state_dict(self) -> dict[str, np.ndarray]:
        return state_dicts(self._drafters)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        load_state_dicts(self._drafters, state)

    def stats(self) -> dict[str, np.ndarray]:
        return stats_of(self._drafters)

    def load_stats(self, stats: Mapping[str, np.ndarray]) -> None:
        load_stats_into(self._drafters, stats)


class Stage(DrafterGroup):
    """Drafters that draft for a draft, so that it reads several tokens a pass: the next level of a
    cascade. They follow the text, and after it what the draft has written so far. Without any
    the draft writes every token in a pass of its own."""

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    def chain(self, last: int, num_draft_tokens: int) -> TokenTree:
        """Drafts a chain below `last`, the last token of the text and the draft tokens."""
        return TokenTree.chain(last)

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        """Tells what the draft has written in place of the tree that was drafted last.

        logits: [rows, vocab] of the draft, valid during this call."""


def as_drafter(drafter: Any) -> Drafter:
    """Gives it all members of a `Drafter`, whatever class it is of."""
    return drafter if isinstance(drafter, Drafter) else DrafterWrapper(drafter)


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *given: self._ask(name, *given)


def _to_all(name: str) -> Callable[..., None]:
    def tell(self: DrafterGroup, *given: Any) -> None:
        for drafter in self._drafters:
            getattr(drafter, name)(*given)

    return tell


for _name, _member in _MEMBERS.items():
    _call = _passed_on(_name)
    setattr(DrafterWrapper, _name, property(_call) if isinstance(_member, property) else _call)
for _name in _CALLED:
    setattr(DrafterGroup, _name, _to_all(_name))


# Kinds of draft token: contested by a sibling that only others proposed, or made by several
# drafters; each by steps of the chance that at least one of its drafters is right, if they were
# independent: they are not, and agreement says less than that. Measured over greedy texts of a 135M
# chat model (suffix and recycling). A draft token that is neither keeps its drafter's own
# confidence.
_STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_CONTESTED, _AGREED = range(2)
_PRIORS = (
    (0.03, 0.06, 0.07, 0.15, 0.20, 0.21, 0.28, 0.40, 0.55, 0.73, 0.88, 0.92, 0.95),
    (0.05, 0.12, 0.18, 0.20, 0.28, 0.29, 0.33, 0.38, 0.53, 0.72, 0.89, 0.95, 0.98),
)


class CompositeDrafter(DrafterGroup):
    """Asks all of its drafters for each tree."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self._acceptance = LearntAcceptance([prior for row in _PRIORS for prior in row])
        self._growth = nothing(0)

    @property
    def idle_reason(self) -> PlainReason | None:
        """Returns the last one's where none of them drafts."""
        reasons = [drafter.idle_reason for drafter in self._drafters]
        return None if None in reasons else reasons[-1]

    def begin(self, prompt: Sequence[int]) -> None:
        self._growth = nothing(prompt[-1])
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        trees = [drafter.propose(pending, budget) for drafter in self._drafters]
        merged = merge_rows(pending, trees)
        if len(merged) == 1:
            return TokenTree.chain(pending)
        kinds, confidence = self._rated(merged, [tree.confidence.tolist() for tree in trees])
        tree = tree_of(merged, confidence)
        self._growth = Growth(tree, kinds)
        return tree if budget.branches else chain_first(tree, budget.num_rows)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        super().observe(tree, out, verdict)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth = nothing(verdict.next_token)
        super().skip(tree, out, verdict)

    @property
    def anticipates(self) -> bool:
        return any(drafter.anticipates for drafter in self._drafters)

    @property
    def was_ready(self) -> bool:
        return any(drafter.was_ready for drafter in self._drafters)

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        for drafter in self._drafters:
            if drafter.anticipates:
                drafter.anticipate(stopped)

    @property
    def text_counts(self) -> TextCounts:
        counts = [drafter.text_counts for drafter in self._drafters]
        return TextCounts(*map(sum, zip(*counts, strict=True)))

    def stats(self) -> dict[str, np.ndarray]:
        return {self.name: self._acceptance.stats(), **super().stats()}

    def load_stats(self, stats: Mapping[str, np.ndarray]) -> None:
        if self.name in stats:
            self._acceptance.load_stats(stats[self.name])
        super().load_stats(stats)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"acceptance": self._acceptance.snapshot(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self._acceptance.restore(state["acceptance"])
        super().load_state_dict(state)

    def _rated(
        self, merged: Sequence[MergedRow], trees: Sequence[Sequence[float]]
    ) -> tuple[list[int | None], list[float]]:
        """The kind and the confidence of each row, the pending token's not read; trees: the
        confidence of their rows."""
        proposers: dict[int, set[str]] = {}  # of each row's children
        for entry in merged:
            proposers.setdefault(entry.parent, set()).update(entry.drafters)
        kinds: list[int | None] = []
        confidence = []
        for entry in merged:
            together = 1 - prod(1 - trees[which][row] for which, row in entry.sources)
            kind = None
            if len(proposers[entry.parent]) > 1:
                case = _AGREED if len(entry.drafters) > 1 else _CONTESTED
                kind = case * len(_PRIORS[0]) + bisect_right(_STEPS, together)
            kinds.append(kind)
            confidence.append(together if kind is None else self._acceptance.estimate(kind))
        return kinds, confidence
