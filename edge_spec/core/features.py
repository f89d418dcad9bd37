"""Features: what a target's layers have computed of each token, which trained drafters draft from.

Feature `i` of a model is the residual stream that enters layer `i`, before any norm; feature
`num_layers` is the state after the final norm, which the head reads (`Forward.hidden`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from edge_spec.errors import SessionError

# Hears of prefilled tokens: the position of the first, and [tokens, features, hidden_size]
# float32, valid until it returns.
OnPrefilled = Callable[[int, np.ndarray], None]


@runtime_checkable
class GivesFeatures(Protocol):
    """A session whose passes can return features beside their scores. Whoever makes a pass of
    several sessions leaves it out while it collects them, unless it `SharesFeatures`."""

    @property
    def collects(self) -> bool:
        """Return whether its passes return features now."""

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """Makes each `forward` from now on fill `Forward.features`, and each `prefill` tell
        `on_prefilled`. layers: ids from 0 to num_layers, ascending; none: no features any more,
        which is how a session begins. Raises UnsupportedModelError where the library does not give
        them for this model, ValueError for other ids."""


@runtime_checkable
class SharesFeatures(Protocol):
    """A session that may have features of shared passes, too: those of scored rows in
    `Forward.features`; `on_prefilled` hears of others when they are committed."""

    @property
    def shares_features(self) -> bool:
        """Return whether shared passes give all that is collected of it now."""


def require_layers(layers: Sequence[int], num_layers: int) -> None:
    """Checks what every such session has to. Raises ValueError."""
    if list(layers) != sorted(set(layers)) or (layers and not 0 <= layers[0] <= layers[-1]):
        raise ValueError(f"features {list(layers)} are not in ascending order")
    if layers and layers[-1] > num_layers:
        raise ValueError(f"a model of {num_layers} layers has no feature {layers[-1]}")


def collects(session: object) -> bool:
    """Return whether this session's passes return features now."""
    return isinstance(session, GivesFeatures) and session.collects


def collects_alone(session: object) -> bool:
    """Return whether this session has its passes alone, for the sake of features."""
    if not collects(session):
        return False
    return not (isinstance(session, SharesFeatures) and session.shares_features)


def require_none_alone(sessions: Iterable[object]) -> None:
    """Checks what a pass that several share has to. Raises SessionError."""
    if any(map(collects_alone, sessions)):
        raise SessionError(
            "a conversation whose features are collected shares no pass",
            remedy="It is scored alone.",
        )


@runtime_checkable
class SharesKeysValues(Protocol):
    """A session whose keys and values may be read by another network that attends to them."""

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """layers: those with keys and values of their own that are asked for from now on; none, as
        at first: nobody asks. Raises UnsupportedModelError where the library does not give them for
        this model."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what a layer has of the committed tokens, keys as they were turned: [kv_heads,
        length, head_dim] each, floats, valid until the session does anything else. None where
        tokens were read before anyone asked."""
