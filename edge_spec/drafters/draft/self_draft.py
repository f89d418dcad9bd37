"""A part of the target drafts for the whole: no second model, and no cache of its own.

Early exit (Elhoushi et al. 2024, LayerSkip) keeps the first layers; layer skipping (Zhang et al.
2023, Draft & Verify; Xia et al. 2024, SWIFT) any set of attentions and MLPs. Which layers do is
searched on the text at hand, unless it was settled before (`edge-spec tune-skip`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from edge_spec.core.model import Forward, Model, SelfDrafting, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import GREEDY, TRAITS, Budget, Drafter
from edge_spec.errors import UnsupportedModelError

WINDOW = 48  # tokens at the end of a text that a choice of layers is judged on

_log = logging.getLogger(__name__)


class TargetPart(Protocol):
    """A part of a model, and what it promised when it was chosen."""

    @property
    def forecast(self) -> float:
        """Speedup over plain decoding."""

    def __str__(self) -> str: ...

    def open(self, session: SelfDrafting) -> Session: ...


class Search(Protocol):
    """Finds the part of a model that drafts best on a text."""

    def first(self, model: Model, text: Sequence[int]) -> TargetPart:
        """Raises UsageError where the model cannot be run in part."""


class SelfDrafter(Drafter):
    """Waits for WINDOW tokens of text to choose its layers by, where it was not given a part. A
    part that gains nothing is not asked for draft tokens."""

    traits = TRAITS["layer-skip"]

    def __init__(self, name: str, search: Search, part: TargetPart | None = None) -> None:
        self.name = name
        self._search = search
        self._part = part
        self._drafter: DraftModelDrafter | None = None
        self._model: Model | None = None
        self._target: SelfDrafting | None = None
        self._view: Session | None = None
        self._sampler = GREEDY
        self._text: list[int] = []

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime cannot run a model in part, UsageError
        where this one was exported without what that takes."""
        if not isinstance(session, SelfDrafting):
            raise UnsupportedModelError(
                f"the drafter {self.name} needs a runtime that can run a model in part",
                remedy="Use --runtime ort on the CPU and a model that edge-spec converts by itself "
                "(docs/models.md), or another drafter.",
            )
        self.close()
        self._model, self._target = model, session
        if self._part is None:  # says at once, not in the middle of a text, if there are no parts
            session.open_skipping(frozenset()).close()
        self._open()

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._text, self._sampler = list(prompt), sampler
        if self.fault is not None:
            self.close()
        if self._drafter is not None:
            self._drafter.begin(prompt, sampler)
        elif self._part is None or self.fault is not None:
            self._open()

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if self._drafter is None:
            return TokenTree.chain(pending)
        tree = self._drafter.propose(pending, budget)
        self.passes = self._drafter.passes
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._text += verdict.tokens
        if self._drafter is not None:
            self._drafter.observe(tree, out, verdict)
        elif self._part is None:
            self._open()

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        return self._drafter.sibling_acceptance if self._drafter is not None else ()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = self._drafter = None

    def _open(self) -> None:
        """Opens the part, which is chosen now where there is none and enough text."""
        assert self._model is not None and self._target is not None  # attached before
        if self._part is None and len(self._text) > WINDOW:
            self._part = self._search.first(self._model, self._text)
        if self._part is None:
            return
        (_log.info if self._part.forecast > 1 else _log.warning)("%s: %s", self.name, self._part)
        if self._part.forecast <= 1:
            return
        self._view = self._part.open(self._target)
        vocab_size = self._model.config.vocab_size
        self._drafter = DraftModelDrafter(
            self._model, self._view, vocab_size, shared=True, name=self.name
        )
        if self._text:
            self._drafter.begin(self._text, self._sampler)
