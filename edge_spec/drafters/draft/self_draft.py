"""A part of the target drafts for the whole: no second model, and no cache of its own.

Early exit (Elhoushi et al. 2024, LayerSkip) keeps the first layers; layer skipping (Zhang et al.
2023, Draft & Verify; Xia et al. 2024, SWIFT) any set of attentions and MLPs. Which layers do is
searched on the text at hand, unless it was settled before (`edge-spec tune-skip`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edge_spec.core.model import Forward, Model, SelfDrafting, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Budget, Cost, Drafter, DrafterTraits
from edge_spec.errors import UnsupportedModelError

WINDOW = 48  # tokens at the end of a text that a choice of layers is judged on
_SHARE = 0.02  # of a generation's time that may go into looking for better layers

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

    def better(self, model: Model, text: Sequence[int], part: TargetPart) -> TargetPart:
        """The same part, or one that was tried now and is better."""


class SelfDrafter(Drafter):
    """Waits for WINDOW tokens of text to choose its layers by, where it was not given a part."""

    traits = DrafterTraits(cost=Cost.PASS, samples=True, target_session=True, target_layers=True)

    def __init__(
        self,
        name: str,
        search: Search,
        part: TargetPart | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._search = search
        self._part = part
        self._clock = clock
        self._drafter: DraftModelDrafter | None = None
        self._model: Model | None = None
        self._target: SelfDrafting | None = None
        self._view: Session | None = None
        self._sampler: Sampler | None = None
        self._text: list[int] = []
        self._settled = part is not None
        self._try_s = self._searched_s = 0.0  # seconds of the last try, and of all
        self._since = clock()

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
        if self._part is not None:
            self._say(self._part)
            self._open(self._part)
        else:  # says at once, not in the middle of a text, where the model has no parts
            session.open_skipping(frozenset()).close()

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler
        if self._drafter is not None:
            self._drafter.use_sampler(sampler)

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._since, self._searched_s = self._clock(), 0.0
        if self._part is None and len(prompt) > WINDOW:
            self._find()
        if self._drafter is not None:
            self._drafter.begin(prompt)

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
        if self._part is not None:
            self._improve()
        elif len(self._text) > WINDOW:
            self._find()

    def sibling_acceptance(self) -> Sequence[float]:
        return self._drafter.sibling_acceptance() if self._drafter is not None else ()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = self._drafter = None

    def _find(self) -> None:
        assert self._model is not None  # attached before the first text
        start = self._clock()
        part = self._search.first(self._model, self._text)
        self._say(part)
        self._open(part)
        self._try_s = self._clock() - start

    def _improve(self) -> None:
        """Tries another set as often as the time for it allows."""
        assert self._model is not None and self._part is not None
        start = self._clock()
        if self._settled or self._searched_s + self._try_s > _SHARE * (start - self._since):
            return
        better = self._search.better(self._model, self._text, self._part)
        if better is not self._part:
            _log.info("%s: %s", self.name, better)
            self._open(better)
        self._try_s = self._clock() - start
        self._searched_s += self._try_s

    def _say(self, part: TargetPart) -> None:
        (_log.info if part.forecast > 1 else _log.warning)("%s: %s", self.name, part)

    def _open(self, part: TargetPart) -> None:
        """A part that gains nothing is not asked for draft tokens."""
        assert self._model is not None and self._target is not None
        self.close()
        self._part = part
        if part.forecast <= 1:
            return
        self._view = part.open(self._target)
        vocab_size = self._model.config.vocab_size
        self._drafter = DraftModelDrafter(
            self._model, self._view, vocab_size, shared=True, name=self.name
        )
        if self._sampler is not None:
            self._drafter.use_sampler(self._sampler)
        if self._text:
            self._drafter.begin(self._text)
