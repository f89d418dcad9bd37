"""Features: hidden states of the target's layers, which trained drafters draft from.

Feature `i` is the residual stream that enters layer `i`, before any norm; feature `num_layers` is
the state after the final norm, which the output matrix reads (`Forward.hidden`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from edge_spec.errors import SessionError

# Receives features of prefilled tokens: the first token's position, and [tokens, features,
# hidden_size] float32, valid until it returns.
OnPrefilled = Callable[[int, np.ndarray], None]


@runtime_checkable
class GivesFeatures(Protocol):
    """A session whose passes can return features with their logits. While it collects them it stays
    out of shared passes, unless it `SharesFeatures`."""

    @property
    def collects(self) -> bool:
        """Return whether its passes return features now."""

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """Make later `forward` calls fill `Forward.features`, and later `prefill` calls call
        `on_prefilled`. layers: ids from 0 to num_layers, ascending; empty (the initial state):
        none. Raises UnsupportedModelError where the library cannot return them for this model,
        ValueError for other ids."""


@runtime_checkable
class SharesFeatures(Protocol):
    """A session that may get features from shared passes: `Forward.features` for scored rows;
    `on_prefilled` gets those of other rows when they are committed."""

    @property
    def shares_features(self) -> bool:
        """Return whether shared passes return all features that it collects now."""


def require_layers(layers: Sequence[int], num_layers: int) -> None:
    """Check the ids given to `collect_features`. Raises ValueError."""
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
    """Check that all sessions may share a pass. Raises SessionError."""
    if any(map(collects_alone, sessions)):
        raise SessionError(
            "a conversation whose features are collected shares no pass",
            remedy="It is scored alone.",
        )


@runtime_checkable
class SharesKeysValues(Protocol):
    """A session whose keys and values another network may attend to."""

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """Choose the layers to share from now on, each with keys and values of its own; empty (the
        initial state): none. Raises UnsupportedModelError where the library cannot return them for
        this model."""

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a layer's keys (rotated) and values of the committed tokens, [kv_heads, length,
        head_dim] floats each, valid until the next call to the session. None where tokens were read
        before sharing began."""
