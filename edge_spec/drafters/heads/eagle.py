"""Drafts with an EAGLE head (Li et al. 2024, 2025): a draft model that reads its target's features.

Trees, samples and how sure the head must be are those of `DraftModelDrafter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits
from edge_spec.errors import UnsupportedModelError

# Who reads a session's features: the drafter that was attached last. One that takes its place is
# attached before it is closed.
_readers: WeakKeyDictionary[Any, EagleDrafter] = WeakKeyDictionary()


class EagleDrafter(DraftModelDrafter):
    """network: of the head; drafters of several conversations share it."""

    traits = DrafterTraits(cost=Cost.PASS, samples=True, target_session=True, head="eagle")

    def __init__(self, network: EagleNetwork, name: str = "eagle") -> None:
        self._network = network
        self._features = FeatureStore(network.features_size, WINDOW)
        self._collecting: GivesFeatures | None = None
        self._text_tokens: list[int] = []
        model = EagleModel(network, self._features)
        super().__init__(model, model.open_session(), network.config.vocab_size, name=name)

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        if not isinstance(session, GivesFeatures):
            raise UnsupportedModelError(
                f"the drafter {self.name} needs what the target's layers compute, which this "
                "runtime does not give",
                remedy="Use another --runtime, or another drafter.",
            )
        session.collect_features(self._network.feature_layers, self._take)
        self._collecting, _readers[session] = session, self
        self._features.clear()

    def prepare(self, prompt: Sequence[int]) -> None:
        """Waits: the target's features of the prompt are not there yet."""

    def begin(self, prompt: Sequence[int]) -> None:
        agreed = 0
        for old, new in zip(self._text_tokens, prompt, strict=False):
            if old != new:
                break
            agreed += 1
        self._features.begin(agreed, len(prompt) - 1)
        self._text_tokens = list(prompt)
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if not self._features.has(len(self._text_tokens) - 2):
            return TokenTree.chain(pending)  # after a snapshot, until the target's next pass
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        if out.features is not None and verdict.tokens:
            rows = out.features[np.asarray(verdict.kept)]
            self._take(len(self._text_tokens) - 1, rows)
        self._text_tokens += verdict.tokens
        super().observe(tree, out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._features.clear()
        self._text_tokens = []

    def close(self) -> None:
        session, self._collecting = self._collecting, None
        if session is not None and _readers.get(session) is self:
            session.collect_features((), _ignore)
        super().close()

    def _take(self, position: int, found: np.ndarray) -> None:
        self._features.put(position, found.reshape(len(found), -1))


def _ignore(position: int, found: np.ndarray) -> None:
    """Takes nothing."""
