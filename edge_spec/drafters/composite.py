"""Several drafters as one: their draft tokens in one tree, each row remembering who proposed it.

A draft token that another drafter contradicts is right less often than its own drafter says, one
that several make more often; how much is learnt, so that the merged tree's confidence is calibrated
too. One that fails is not asked again in the answer: its faults stay away from the text.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import STATE_TYPES, Forward
from edge_spec.core.sampling import Constraint, Sampler, permitted
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.core.tree import TokenTree, Verdict, chain_first
from edge_spec.drafters.protocol import (
    Budget,
    Drafter,
    TextCounts,
    load_state_dicts,
    load_stats_into,
    state_dicts,
    stats_of,
)
from edge_spec.drafters.tree_builder import (
    Growth,
    LearntAcceptance,
    MergedRow,
    merge_rows,
    nothing,
    tree_of,
)
from edge_spec.errors import EdgeSpecError

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


_LONGEST_REST = 64  # answers, for a drafter that keeps failing
_ROUNDING = 1e-4  # of a sum of float32 probabilities

_log = logging.getLogger(__name__)


class GuardedDrafter(DrafterWrapper):
    """Another drafter, dropped for the rest of the answer when it raises or proposes what no target
    can score. Why is logged once and kept in `fault`. What the answer's constraint forbids is cut
    off.

    At the next answer it is tried again if it can be reopened; after each further failure it rests
    for twice as many answers, so that a device that is gone costs next to nothing.

    vocab_size: of the target. KeyboardInterrupt and the like pass, and what the user has to know:
    an EdgeSpecError of `attach`, a KeyError or ValueError for what is no state of such a drafter.
    """

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        super().__init__(drafter)
        self.fault: str | None = None
        self._vocab_size = vocab_size
        self._constraint: Constraint | None = None
        self._rests = SpacedRetries(1, _LONGEST_REST)  # in answers, from one try to the next

    def use_sampler(self, sampler: Sampler) -> None:
        self._constraint = sampler.constraint
        self._ask("use_sampler", sampler)

    def recover(self) -> None:
        if self.fault is None:  # it has come through an answer
            self._rests.reset()
            return
        self._rests.count()
        if self._rests.resting:
            return
        self._rests.rest()
        try:
            if not super()._ask("reopen"):
                return
        except Exception as error:
            _log.info("the drafter %s stays away: %s", self.name, error)
            return
        self.fault = None
        _log.info("the drafter %s is asked again", self.name)

    @property
    def idle_reason(self) -> PlainReason | None:
        if self.fault is not None:
            return PlainReason.DRAFT_FAILED
        reason: PlainReason | None = self._ask("idle_reason")
        return reason

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if self.fault is None:
            try:
                tree = self._checked(super()._ask("propose", pending, budget), pending)
                if tree.draft_probs and not (budget.branches or tree.is_chain):
                    # Whether it does could depend on what was sampled, and with it the rule.
                    raise ValueError("sampled rows that branch where they must not")
                return tree if self._constraint is None else permitted(tree, self._constraint)
            except Exception as error:
                self._drop(error)
        return TokenTree.chain(pending)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            self._ask("load_state_dict", state)

    def _ask(self, name: str, *given: Any) -> Any:
        """Returns the default where the drafter is, or now gets, dropped."""
        if self.fault is None or name in _ALSO_DROPPED:
            try:
                found = super()._ask(name, *given)
                return _CHECKS[name](found) if name in _CHECKS else found
            except _PASSED_ON.get(name, ()):
                raise
            except Exception as error:
                self._drop(error)
        return self._default(name, *given)

    def _checked(self, tree: TokenTree, pending: int) -> TokenTree:
        """Raises ValueError for a tree that would end the generation or change its text."""
        if tree.tokens.ndim != 1 or tree.parents.ndim != 1 or tree.confidence.ndim != 1:
            raise ValueError("tokens, parents or confidence that are no list")
        if int(tree.tokens[0]) != pending:
            raise ValueError(f"row 0 holds token {tree.tokens[0]} instead of {pending}")
        if len(tree) == 1:
            return tree
        if not all(isinstance(name, str) for name in tree.proposed_by):
            raise ValueError("proposed_by that are no names")
        if {tree.tokens.dtype.kind, tree.parents.dtype.kind} != {"i"}:
            raise ValueError("tokens or parents that are no integers")
        tokens = tree.tokens.tolist()
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(f"tokens beyond the vocabulary of {self._vocab_size}")
        if not all(0 <= confidence <= 1 for confidence in tree.confidence.tolist()):
            raise ValueError("a confidence outside 0 to 1")
        if tree.draft_probs:
            _check_draft_probs(tree, self._vocab_size)
            _check_siblings(tree)
        for needed, parent in zip(tree.required, tree.parents.tolist(), strict=False):
            if needed and parent > 0 and not tree.required[parent]:
                raise ValueError("a row that is needed below one that is not")
        return tree

    def _drop(self, error: Exception) -> None:
        if self.fault is not None:
            return
        self.fault = " ".join(f"{type(error).__name__}: {error}".split())
        _log.warning(
            "the drafter %s failed and is not asked again in this answer (%s); "
            "the text stays correct",
            self.name,
            self.fault,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


def _chances(chances: Sequence[float]) -> Sequence[float]:
    """Raises ValueError for what are no probabilities."""
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError("an acceptance outside 0 to 1")
    return chances


def _keepable(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Raises ValueError for what `write_snapshot` would refuse."""
    for name, array in state.items():
        if (
            not isinstance(array, np.ndarray)
            or array.dtype.newbyteorder("<").str not in STATE_TYPES
        ):
            raise ValueError(f"a snapshot whose {name} is no array of {', '.join(STATE_TYPES)}")
    return dict(state)


def _counts(stats: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Raises ValueError for what are no arrays of numbers by name."""
    for name, counts in stats.items():
        is_numbers = isinstance(counts, np.ndarray) and counts.dtype.kind in "iuf"
        if not isinstance(name, str) or not is_numbers or not np.isfinite(counts).all():
            raise ValueError(f"counts of {name} that are none")
    return dict(stats)


def _check_draft_probs(tree: TokenTree, vocab_size: int) -> None:
    """A sample is accepted by what it was sampled from: where that is no distribution, the text
    would have another one than the target's. Raises ValueError."""
    checked: set[int] = set()  # siblings share theirs
    for token, probs in zip(tree.tokens.tolist(), tree.draft_probs, strict=True):
        if probs is None:
            continue
        if probs.shape != (vocab_size,) or not probs[token] > 0:
            raise ValueError("a token that was not sampled from its draft_probs")
        if id(probs) in checked:
            continue
        checked.add(id(probs))
        # The sum of a NaN and anything is one.
        if not (abs(float(probs.sum()) - 1) <= _ROUNDING and float(probs.min()) >= 0):
            raise ValueError("draft_probs that are no distribution")


def _check_siblings(tree: TokenTree) -> None:
    """A sampled row counts only after its siblings before it, so a policy must never find it
    likelier than these and keep it without them. Raises ValueError."""
    last: dict[int, float] = {}
    for row, parent in enumerate(tree.parents.tolist()):
        confidence = float(tree.confidence[row])
        if tree.draft_probs[row] is not None and confidence > last.get(parent, 1.0):
            raise ValueError("a sampled row with more confidence than its sibling before it")
        last[parent] = confidence


# Asked of a drafter that was dropped, too: counts add up, and what is open has to be closed.
_ALSO_DROPPED = ("text_counts", "close")
_PASSED_ON: Mapping[str, tuple[type[Exception], ...]] = {
    "attach": (EdgeSpecError,),
    "load_state_dict": (KeyError, ValueError),
    "load_stats": (ValueError,),
}
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "sibling_acceptance": _chances,
    "reported_acceptance": _chances,
    "state_dict": _keepable,
    "stats": _counts,
}
