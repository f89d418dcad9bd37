"""The features that a head's drafter has of its text, as its target's passes return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Forward, Session
from edge_spec.core.tree import Verdict
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.errors import UnsupportedModelError

# Who reads a session's features: the drafter that was attached last. One that takes its place is
# attached before it is closed.
_readers: WeakKeyDictionary[Any, TargetFeatures] = WeakKeyDictionary()


class TargetFeatures:
    """Keeps a store in step with the text. layers: whose features are read."""

    def __init__(self, layers: Sequence[int], size: int, window: int) -> None:
        self.store = FeatureStore(size, window)
        self.text: list[int] = []  # with the pending token, the last
        self._layers = layers
        self._collecting: GivesFeatures | None = None

    @property
    def is_ready(self) -> bool:
        """Says whether the feature of the token before the pending one is known; it is not after a
        snapshot, until the target's next pass."""
        return self.store.has(len(self.text) - 2)

    def attach(self, session: Session, name: str) -> None:
        """name: of the drafter. Raises UnsupportedModelError where the runtime does not give
        features."""
        if not isinstance(session, GivesFeatures):
            raise UnsupportedModelError(
                f"the drafter {name} needs what the target's layers compute, which this "
                "runtime does not give",
                remedy="Use another --runtime, or another drafter.",
            )
        session.collect_features(self._layers, self._take)
        self._collecting, _readers[session] = session, self
        self.store.clear()

    def begin(self, prompt: Sequence[int]) -> int:
        """Returns how many of its first tokens are those of the text before."""
        agreed = 0
        for old, new in zip(self.text, prompt, strict=False):
            if old != new:
                break
            agreed += 1
        self.store.begin(agreed, len(prompt) - 1)
        self.text = list(prompt)
        return agreed

    def observe(self, out: Forward, verdict: Verdict) -> None:
        if out.features is not None and verdict.tokens:
            self._take(len(self.text) - 1, out.features[np.asarray(verdict.kept)])
        self.text += verdict.tokens

    def forget(self) -> None:
        self.store.clear()
        self.text = []

    def close(self) -> None:
        session, self._collecting = self._collecting, None
        if session is not None and _readers.get(session) is self:
            session.collect_features((), _ignore)

    def _take(self, position: int, found: np.ndarray) -> None:
        self.store.put(position, found.reshape(len(found), -1))


def _ignore(position: int, found: np.ndarray) -> None:
    """Takes nothing."""
