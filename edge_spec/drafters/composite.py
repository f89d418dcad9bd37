"""Several drafters as one, and a guard for drafters that fail.

Draft tokens form one tree, whose rows record who proposed them. A token that another drafter
contradicts is right less often than its drafter says, one that several agree on more often; both
are learnt. A drafter that fails is dropped for the answer and cannot affect the text.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Constraint, Sampler, permitted
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.core.tree import TokenTree, Verdict, chain_first
from edge_spec.drafters.protocol import GREEDY, Budget, Drafter, named, part_of
from edge_spec.drafters.tree_builder import (
    Growth,
    LearntAcceptance,
    TreeRows,
    merge,
    nothing,
)
from edge_spec.errors import EdgeSpecError


class DrafterGroup(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def attach(self, model: Model, session: Session) -> None:
        for drafter in self._drafters:
            drafter.attach(model, session)

    def prepare(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.prepare(prompt)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        for drafter in self._drafters:
            drafter.fault = self.fault
            drafter.begin(prompt, sampler)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        for drafter in self._drafters:
            drafter.observe(tree, out, verdict)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        for drafter in self._drafters:
            drafter.skip(tree, out, verdict)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        state: dict[str, np.ndarray] = {}
        for drafter in self._drafters:
            state |= named(drafter.name, drafter.state(learnt_only))
        return state

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load states by drafter name; a drafter without one starts afresh. Raises KeyError or
        ValueError for other drafters."""
        known = {drafter.name for drafter in self._drafters}
        unknown = {name.partition("/")[0] for name in state if "/" in name} - known
        if unknown:
            raise KeyError(f"no drafter {', '.join(sorted(unknown))} to restore")
        for drafter in self._drafters:
            own = part_of(state, drafter.name)
            if own:
                drafter.load(own, learnt_only)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


class StageDrafter(Drafter):
    """Can also draft for a draft model, after draft tokens that may be taken back."""

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Like `observe`, for tokens that are themselves draft tokens."""

    def rollback_draft(self, keep: int) -> None:
        """Drop the tokens of `extend_draft` but the first `keep`; `observe` drops all."""


class Stage(DrafterGroup):
    """A cascade level: drafters for a draft model, so that it reads several tokens per pass. They
    follow the text and the draft's tokens so far. Without any, each token takes a pass."""

    _drafters: Sequence[StageDrafter]

    def __init__(self, drafters: Sequence[StageDrafter] = ()) -> None:
        super().__init__(drafters)

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        for drafter in self._drafters:
            drafter.extend_draft(tree, out, verdict)

    def rollback_draft(self, keep: int) -> None:
        for drafter in self._drafters:
            drafter.rollback_draft(keep)

    def chain(self, last: int, num_draft_tokens: int) -> TokenTree:
        """Draft a chain below `last`, the last token of text and draft tokens."""
        return TokenTree.chain(last)

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        """Learn what the draft wrote in place of the last chain. logits: [rows, vocab] of the
        draft, valid during this call."""


# Kinds of draft token: contested by a sibling that only others proposed, or proposed by several;
# each by the chance that any of its drafters is right, as if independent (they are not). Measured
# over greedy texts of a 135M chat model (suffix and recycling). Others keep their drafter's
# confidence.
_STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_CONTESTED, _AGREED = range(2)
_PRIORS = (
    (0.03, 0.06, 0.07, 0.15, 0.20, 0.21, 0.28, 0.40, 0.55, 0.73, 0.88, 0.92, 0.95),
    (0.05, 0.12, 0.18, 0.20, 0.28, 0.29, 0.33, 0.38, 0.53, 0.72, 0.89, 0.95, 0.98),
)


class CompositeDrafter(DrafterGroup):
    """Asks several lookup drafters for each tree."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self._acceptance = LearntAcceptance([prior for row in _PRIORS for prior in row])
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._growth = nothing(prompt[-1])
        super().begin(prompt, sampler)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        trees = [drafter.propose(pending, budget) for drafter in self._drafters]
        rows, chances = merge(pending, trees)
        if len(rows) == 1:
            return TokenTree.chain(pending)
        kinds, confidence = self._rated(rows, chances)
        tree = rows.tree(confidence)
        self._growth = Growth(tree, kinds)
        return tree if budget.branches else chain_first(tree, budget.num_rows)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        super().observe(tree, out, verdict)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth = nothing(verdict.next_token)
        super().skip(tree, out, verdict)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        return {**self._acceptance.state(learnt_only), **super().state(learnt_only)}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        if "acceptance" in state or not learnt_only:
            self._acceptance.load(state, learnt_only)
        super().load(state, learnt_only)

    def _rated(
        self, rows: TreeRows, chances: Sequence[Sequence[float]]
    ) -> tuple[list[int | None], list[float]]:
        """Return the kind and confidence of each row, the pending one's unused. chances: drafters'
        confidences by row."""
        proposers: dict[int, set[str]] = {}  # of each row's children
        for parent, drafters in zip(rows.parents, rows.drafters, strict=True):
            proposers.setdefault(parent, set()).update(drafters)
        kinds: list[int | None] = []
        confidence = []
        for row, parent in enumerate(rows.parents):
            together = 1 - prod(1 - chance for chance in chances[row])
            kind = None
            if len(proposers[parent]) > 1:
                case = _AGREED if len(rows.drafters[row]) > 1 else _CONTESTED
                kind = case * len(_PRIORS[0]) + bisect_right(_STEPS, together)
            kinds.append(kind)
            confidence.append(together if kind is None else self._acceptance.estimate(kind))
        return kinds, confidence


_LONGEST_REST = 64  # answers, for a drafter that keeps failing
_ROUNDING = 1e-4  # of a sum of float32 probabilities

_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class GuardedDrafter(Drafter):
    """Guards a drafter: drops it for the rest of the answer if it raises or proposes an invalid
    tree.

    Logs the reason once and keeps it in `fault`. Cuts off what the answer's constraint forbids. The
    next answer tries again; each further failure doubles the rest, so a lost device costs next to
    nothing. Passes on KeyboardInterrupt, an EdgeSpecError of the first `attach`, and KeyError or
    ValueError for another drafter's state. vocab_size: of the target.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name, self.traits = drafter.name, drafter.traits
        self.reported_acceptance = drafter.reported_acceptance
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._is_attached = False
        self._constraint: Constraint | None = None
        self._rests = SpacedRetries(1, _LONGEST_REST)  # in answers, from one try to the next

    def attach(self, model: Model, session: Session) -> None:
        """Attach the drafter even if it failed, for the next try."""
        refusals = () if self._is_attached else (EdgeSpecError,)
        self.fault, before = None, self.fault
        self._try(self._drafter.attach, model, session, refusals=refusals)
        self.fault = before or self.fault
        self._is_attached = True

    def prepare(self, prompt: Sequence[int]) -> None:
        before = self.fault
        self._try(self._drafter.prepare, prompt)
        if self.fault is not before:
            self._rests.begin(at_least=2)  # this answer's `begin` ends one

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._constraint = sampler.constraint
        if self.fault is None:  # it came through an answer
            self._rests.reset()
        else:
            self._rests.count()
            if self._rests.resting:
                return
            self._rests.rest()
        self._drafter.fault, self.fault = self.fault, None
        self._try(self._drafter.begin, prompt, sampler)
        self._drafter.fault = None

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        return self._try(self._propose, pending, budget) or TokenTree.chain(pending)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._try(self._drafter.observe, tree, out, verdict)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._try(self._drafter.skip, tree, out, verdict)

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        self._try(self._drafter.anticipate, stopped)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        return self._try(self._drafter.state, learnt_only) or {}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        refusals = (KeyError, ValueError)
        self._try(self._drafter.load, state, learnt_only, refusals=refusals)

    def close(self) -> None:
        """Close the drafter, even if dropped."""
        self.fault, fault = None, self.fault
        self._try(self._drafter.close)
        self.fault = fault or self.fault

    @property
    def idle_reason(self) -> PlainReason | None:
        reason = self._try(lambda: self._drafter.idle_reason)
        return reason if self.fault is None else PlainReason.DRAFT_FAILED

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        return self._try(lambda: self._drafter.sibling_acceptance) or ()

    def _try(
        self,
        work: Callable[..., _Found],
        *given: Any,
        refusals: tuple[type[Exception], ...] = (),
    ) -> _Found | None:
        """Run `work`; return None if the drafter is, or now gets, dropped."""
        if self.fault is not None:
            return None
        try:
            found = work(*given)
            drafter = self._drafter
            self.passes = drafter.passes
            self.anticipates, self.was_ready = drafter.anticipates, drafter.was_ready
            return found
        except refusals:
            raise
        except Exception as error:
            self._drop(error)
            return None

    def _propose(self, pending: int, budget: Budget) -> TokenTree:
        tree = self._drafter.propose(pending, budget)
        check_tree(tree, pending, budget, self._vocab_size)
        return tree if self._constraint is None else permitted(tree, self._constraint)

    def _drop(self, error: Exception) -> None:
        self.fault = " ".join(f"{type(error).__name__}: {error}".split())
        self.anticipates = self.was_ready = False
        _log.log(
            logging.WARNING if self._rests.length == 1 else logging.INFO,
            "the drafter %s failed and is not asked again in this answer (%s); "
            "the text stays correct",
            self.name,
            self.fault,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


def check_tree(tree: TokenTree, pending: int, budget: Budget, vocab_size: int) -> None:
    """Raise ValueError for a tree that would end the generation or change its text."""
    if tree.tokens.ndim != 1 or tree.parents.ndim != 1 or tree.confidence.ndim != 1:
        raise ValueError("tokens, parents or confidence that are no list")
    if int(tree.tokens[0]) != pending:
        raise ValueError(f"row 0 holds token {tree.tokens[0]} instead of {pending}")
    if len(tree) == 1:
        return
    if not all(isinstance(name, str) for name in tree.proposed_by):
        raise ValueError("proposed_by that are no names")
    if {tree.tokens.dtype.kind, tree.parents.dtype.kind} != {"i"}:
        raise ValueError("tokens or parents that are no integers")
    tokens = tree.tokens.tolist()
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"tokens beyond the vocabulary of {vocab_size}")
    if not all(0 <= confidence <= 1 for confidence in tree.confidence.tolist()):
        raise ValueError("a confidence outside 0 to 1")
    for needed, parent in zip(tree.required, tree.parents.tolist(), strict=False):
        if needed and parent > 0 and not tree.required[parent]:
            raise ValueError("a row that is needed below one that is not")
    if tree.draft_probs:
        _check_samples(tree, vocab_size)
        if not (budget.branches or tree.is_chain):
            # Whether it does could depend on the samples, and with it the rule.
            raise ValueError("sampled rows that branch where they must not")


def _check_samples(tree: TokenTree, vocab_size: int) -> None:
    """Raise ValueError for samples that would bias the text.

    Acceptance relies on a sample's distribution. A sample counts only after its earlier siblings,
    so a policy must never find it likelier and keep it without them.
    """
    checked: set[int] = set()  # siblings share theirs
    last: dict[int, float] = {}  # confidence of siblings
    for row, probs in enumerate(tree.draft_probs):
        parent, confidence = int(tree.parents[row]), float(tree.confidence[row])
        if probs is not None:
            if probs.shape != (vocab_size,) or not probs[tree.tokens[row]] > 0:
                raise ValueError("a token that was not sampled from its draft_probs")
            if id(probs) not in checked:
                checked.add(id(probs))
                # NaN makes the sum NaN.
                if not (abs(float(probs.sum()) - 1) <= _ROUNDING and float(probs.min()) >= 0):
                    raise ValueError("draft_probs that are no distribution")
            if confidence > last.get(parent, 1.0):
                raise ValueError("a sampled row with more confidence than its sibling before it")
        last[parent] = confidence
