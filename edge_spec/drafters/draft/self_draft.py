"""A part of the target drafts for the whole, without a second model or cache.

Early exit (Elhoushi et al. 2024, LayerSkip) keeps the first layers; layer skipping (Zhang et al.
2023, Draft & Verify; Xia et al. 2024, SWIFT) any attentions and MLPs that `edge-spec tune-skip`
finds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from edge_spec.core.model import Forward, Model, SelfDrafting, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import GREEDY, TRAITS, Budget, Drafter
from edge_spec.errors import UnsupportedModelError

_log = logging.getLogger(__name__)


class TargetPart(Protocol):
    """A part of a model, and its forecast."""

    @property
    def forecast(self) -> float:
        """Speedup over plain decoding."""

    def __str__(self) -> str: ...

    def open(self, session: SelfDrafting) -> Session: ...


class SelfDrafter(Drafter):
    """Drafts with a part of the target, unless its forecast shows no gain."""

    traits = TRAITS["layer-skip"]

    def __init__(self, name: str, part: TargetPart) -> None:
        self.name = name
        self._part = part
        self._drafter: DraftModelDrafter | None = None
        self._view: Session | None = None

    def attach(self, model: Model, session: Session) -> None:
        """Open the part. Raises UnsupportedModelError if the runtime cannot run a model in part,
        UsageError if the model was exported without support for it."""
        if not isinstance(session, SelfDrafting):
            raise UnsupportedModelError(
                f"the drafter {self.name} needs a runtime that can run a model in part",
                remedy="Use --runtime ort on the CPU and a model that edge-spec converts by itself "
                "(docs/models.md), or another drafter.",
            )
        self.close()
        pays = self._part.forecast > 1
        _log.log(logging.INFO if pays else logging.WARNING, "%s: %s", self.name, self._part)
        if pays:
            reopened = partial(self._open, session)
            self._drafter = DraftModelDrafter(
                model,
                reopened(),
                model.config.vocab_size,
                shared=True,
                name=self.name,
                reopened=reopened,
            )

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        if self._drafter is not None:
            self._drafter.fault = self.fault
            self._drafter.begin(prompt, sampler)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if self._drafter is None:
            return TokenTree.chain(pending)
        tree = self._drafter.propose(pending, budget)
        self.passes = self._drafter.passes
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        if self._drafter is not None:
            self._drafter.observe(tree, out, verdict)

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        return self._drafter.sibling_acceptance if self._drafter is not None else ()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = self._drafter = None

    def _open(self, target: SelfDrafting) -> Session:
        view, self._view = self._view, None
        if view is not None:
            view.close()
        self._view = self._part.open(target)
        return self._view
