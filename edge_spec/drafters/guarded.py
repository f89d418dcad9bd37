"""Keeps a drafter's faults away from the text: one that fails is not asked again in the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import STATE_TYPES
from edge_spec.core.sampling import Constraint, Sampler, permitted
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import DrafterWrapper
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import EdgeSpecError

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
