"""A part of the target drafts for the whole, without a second model or cache.

Early exit (Elhoushi et al. 2024, LayerSkip) keeps the first layers; layer skipping (Zhang et al.
2023, Draft & Verify; Xia et al. 2024, SWIFT) any attentions and MLPs that `edge-spec tune-skip`
finds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from edge_spec.core.model import Model, SelfDrafting, Session
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import TRAITS, Budget
from edge_spec.errors import UnsupportedModelError

_log = logging.getLogger(__name__)


class TargetPart(Protocol):
    """A part of a model, and its forecast."""

    @property
    def forecast(self) -> float:
        """Speedup over plain decoding."""

    def __str__(self) -> str: ...

    def open(self, session: SelfDrafting) -> Session: ...


class SelfDrafter(DraftModelDrafter):
    """Drafts with a part of the target, unless its forecast shows no gain."""

    traits = TRAITS["layer-skip"]

    def __init__(self, name: str, part: TargetPart) -> None:
        """The rest is known once a session is attached."""
        self.name, self._part = name, part
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
        self._pays = self._part.forecast > 1
        _log.log(logging.INFO if self._pays else logging.WARNING, "%s: %s", self.name, self._part)
        self._reopened = partial(self._open, session)  # set first: `begin` tries again
        super().__init__(
            model,
            self._reopened() if self._pays else session,  # else it reads nothing
            model.config.vocab_size,
            shared=True,
            name=self.name,
            reopened=self._reopened,
        )

    def prepare(self, prompt: Sequence[int]) -> None:
        """Read nothing: the target reads the prompt into the cache that both use."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        return super().propose(pending, budget) if self._pays else TokenTree.chain(pending)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        return {}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None: ...

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = None

    def _open(self, target: SelfDrafting) -> Session:
        self.close()
        self._view = self._part.open(target)
        return self._view
