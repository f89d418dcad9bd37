"""Features: hidden states of the target, which trained drafters draft from.

Feature `i` is the residual stream into layer `i`, before any norm; feature `num_layers` is the
state after the final norm (`Forward.hidden`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from edge_spec.errors import SessionError

# Receives features of prefilled tokens: the first one's position, and [tokens, features,
# hidden_size] float32, valid during the call.
OnPrefilled = Callable[[int, np.ndarray], None]


@runtime_checkable
class GivesFeatures(Protocol):
    """A session whose passes can return features. While it collects them it shares no pass, unless
    it `SharesFeatures`."""

    @property
    def collects(self) -> bool:
        """Return whether its passes return features now."""

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """Make later passes fill `Forward.features`, and prefills call `on_prefilled`. layers: ids
        0 to num_layers, ascending; none, as at first: stop. Raises UnsupportedModelError where the
        library cannot, ValueError for other ids."""


@runtime_checkable
class SharesFeatures(Protocol):
    """A session that may have features of shared passes: of scored rows in `Forward.features`, of
    others by `on_prefilled` when they are committed."""

    @property
    def shares_features(self) -> bool:
        """Return whether shared passes return all features collected now."""


def require_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raise ValueError for ids that `collect_features` must refuse."""
    if list(layers) != sorted(set(layers)) or (layers and not 0 <= layers[0] <= layers[-1]):
        raise ValueError(f"features {list(layers)} are not in ascending order")
    if layers and layers[-1] > num_layers:
        raise ValueError(f"a model of {num_layers} layers has no feature {layers[-1]}")


def collects(session: object) -> bool:
    """Return whether this session's passes return features now."""
    return isinstance(session, GivesFeatures) and session.collects


def collects_alone(session: object) -> bool:
    """Return whether collecting features keeps this session out of shared passes."""
    if not collects(session):
        return False
    return not (isinstance(session, SharesFeatures) and session.shares_features)


def require_none_alone(sessions: Iterable[object]) -> None:
    """Raise SessionError if a session must not share a pass."""
    if any(map(collects_alone, sessions)):
        raise SessionError(
            "a conversation whose features are collected shares no pass",
            remedy="It is scored alone.",
        )


@runtime_checkable
class SharesKeysValues(Protocol):
    """A session whose keys and values another network may attend to."""

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """Share these layers' own keys and values from now on; none, as at first: stop. Raises
        UnsupportedModelError where the library cannot."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a layer's keys (rotated) and values of committed tokens, floats [kv_heads, length,
        head_dim], valid until the session's next call; None if tokens were read before sharing
        began."""
