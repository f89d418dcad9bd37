"""Keeps a drafter's faults away from the text: one that fails is not asked again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge_spec.constraint import Constraint, permitted
from edge_spec.drafters.protocol import (
    Anticipating,
    Attached,
    Branching,
    Budget,
    ChoosingAlike,
    Closing,
    CountingText,
    Drafter,
    Keeping,
    Learning,
    Preparing,
    TextCounts,
)
from edge_spec.model import Forward, Model, Session
from edge_spec.sampling import Sampler
from edge_spec.tree import TokenTree, Verdict

_log = logging.getLogger(__name__)


class GuardedDrafter:
    """Another drafter, dropped for the rest of the session when it raises or proposes what no
    target can score. Why is logged once and kept in `fault`. What the answer's constraint forbids
    is cut off.

    vocab_size: of the target. KeyboardInterrupt and the like pass.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name = drafter.name
        self.fault: str | None = None
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._constraint: Constraint | None = None

    def attach(self, model: Model, session: Session) -> None:
        """Not guarded: what the target cannot offer is for the user to know."""
        if isinstance(self._drafter, Attached):
            self._drafter.attach(model, session)

    def choose_like(self, sampler: Sampler) -> None:
        self._constraint = sampler.constraint
        if self.fault is None and isinstance(self._drafter, ChoosingAlike):
            try:
                self._drafter.choose_like(sampler)
            except Exception as error:
                self._drop(error)

    def prepare(self, prompt: Sequence[int]) -> None:
        if self.fault is None and isinstance(self._drafter, Preparing):
            try:
                self._drafter.prepare(prompt)
            except Exception as error:
                self._drop(error)

    def begin(self, prompt: Sequence[int]) -> None:
        if self.fault is None:
            try:
                self._drafter.begin(prompt)
            except Exception as error:
                self._drop(error)

    def sibling_acceptance(self) -> Sequence[float]:
        if self.fault is None and isinstance(self._drafter, Branching):
            try:
                return self._drafter.sibling_acceptance()
            except Exception as error:
                self._drop(error)
        return ()

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if self.fault is None:
            try:
                tree = self._checked(self._drafter.propose(pending, budget), pending)
                return tree if self._constraint is None else permitted(tree, self._constraint)
            except Exception as error:
                self._drop(error)
        return TokenTree.chain(pending)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        if self.fault is None:
            try:
                self._drafter.observe(tree, out, verdict)
            except Exception as error:
                self._drop(error)

    @property
    def anticipates(self) -> bool:
        anticipating = isinstance(self._drafter, Anticipating) and self._drafter.anticipates
        return anticipating and self.fault is None

    @property
    def was_ready(self) -> bool:
        return isinstance(self._drafter, Anticipating) and self._drafter.was_ready

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        if self.fault is None and isinstance(self._drafter, Anticipating):
            try:
                self._drafter.anticipate(stopped)
            except Exception as error:
                self._drop(error)

    def close(self) -> None:
        if isinstance(self._drafter, Closing):
            try:
                self._drafter.close()
            except Exception as error:
                self._drop(error)

    @property
    def text_counts(self) -> TextCounts:
        """Zeros for a drafter that counts none."""
        return (
            self._drafter.text_counts if isinstance(self._drafter, CountingText) else TextCounts()
        )

    def snapshot(self) -> dict[str, np.ndarray]:
        """Empty for a drafter that was dropped or keeps nothing."""
        if self.fault is None and isinstance(self._drafter, Keeping):
            return self._drafter.snapshot()
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state and isinstance(self._drafter, Keeping):
            self._drafter.restore(state)

    def learnt(self) -> dict[str, np.ndarray]:
        """Empty for a drafter that was dropped or learns nothing."""
        if self.fault is None and isinstance(self._drafter, Learning):
            return self._drafter.learnt()
        return {}

    def relearn(self, counts: Mapping[str, np.ndarray]) -> None:
        if isinstance(self._drafter, Learning):
            self._drafter.relearn(counts)

    def _checked(self, tree: TokenTree, pending: int) -> TokenTree:
        """Raises ValueError for a tree that would end the generation or change its text."""
        if int(tree.tokens[0]) != pending:
            raise ValueError(f"row 0 holds token {tree.tokens[0]} instead of {pending}")
        if len(tree) == 1:
            return tree
        if {tree.tokens.dtype.kind, tree.parents.dtype.kind} != {"i"}:
            raise ValueError("tokens or parents that are no integers")
        tokens = tree.tokens.tolist()
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(f"tokens beyond the vocabulary of {self._vocab_size}")
        if not all(0 <= confidence <= 1 for confidence in tree.confidence.tolist()):
            raise ValueError("a confidence outside 0 to 1")
        for token, probs in zip(tokens, tree.draft_probs, strict=False):
            if probs is not None and not (len(probs) == self._vocab_size and probs[token] > 0):
                raise ValueError("a token that was not sampled from its draft_probs")
        if tree.draft_probs:
            _check_siblings(tree)
        for needed, parent in zip(tree.needed, tree.parents.tolist(), strict=False):
            if needed and parent > 0 and not tree.needed[parent]:
                raise ValueError("a row that is needed below one that is not")
        return tree

    def _drop(self, error: Exception) -> None:
        self.fault = " ".join(f"{type(error).__name__}: {error}".split())
        _log.warning(
            "the drafter %s failed and is not asked again (%s); the text stays correct",
            self.name,
            self.fault,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


def _check_siblings(tree: TokenTree) -> None:
    """A sampled row counts only behind its siblings before it, so a policy must never find it
    likelier than these and keep it without them. Raises ValueError."""
    last: dict[int, float] = {}
    for row, parent in enumerate(tree.parents.tolist()):
        confidence = float(tree.confidence[row])
        if tree.draft_probs[row] is not None and confidence > last.get(parent, 1.0):
            raise ValueError("a sampled row with more confidence than its sibling before it")
        last[parent] = confidence
