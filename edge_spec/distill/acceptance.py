"""How far a drafter's tokens would be accepted, measured on what the target wrote by itself.

Whatever a drafter has proposed before a position is the target's own text if it was accepted. So
drafts from every place of a text, each after the target's own tokens, show what would be accepted:
position i counts only where all before it were right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.control.cost import RowCosts, forecast_speedup


@dataclass(frozen=True)
class Acceptance:
    """of_position: by position, given that all before it were accepted. num_drafts: of which the
    first position was measured."""

    of_position: tuple[float, ...]
    num_drafts: int

    @property
    def tokens_a_round(self) -> float:
        """With all positions drafted, the target's own token included."""
        return 1 + float(np.cumprod(self.of_position).sum())


def measured_acceptance(drafts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Acceptance:
    """drafts: of each text, what was drafted from each place and what the target wrote there, both
    [places, positions] int; -1 for what the target did not write any more: the text had ended."""
    right = np.concatenate([drafted == written for drafted, written in drafts])
    there = np.concatenate([written >= 0 for _, written in drafts])
    reached = np.ones(len(right), bool)
    found = []
    for position in range(right.shape[1]):
        tried = reached & there[:, position]
        reached = tried & right[:, position]
        found.append(float(reached.sum() / tried.sum()) if tried.any() else 0.0)
    return Acceptance(tuple(found), int(there[:, 0].sum()))


def written_after(tokens: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """[places, count] int: the tokens from the second one after each place on, since the first one
    after it is the pending token; -1 after the end. tokens: [tokens] int."""
    padded = np.concatenate([tokens, np.full(count + 1, -1, tokens.dtype)])
    found: np.ndarray = padded[places[:, None] + 2 + np.arange(count)]
    return found


@dataclass(frozen=True)
class Forecast:
    """The best chain: how many draft tokens, and its speedup over plain decoding."""

    num_draft_tokens: int
    speedup: float

    @property
    def pays(self) -> bool:
        return self.speedup > 1

    def __str__(self) -> str:
        return f"{self.speedup:.2f} times plain decoding with {self.num_draft_tokens} draft tokens"


def best_chain(
    acceptance: Acceptance, costs: RowCosts, draft_s: Callable[[int], float]
) -> Forecast:
    """By the measured times of passes here. draft_s: seconds for a chain of so many tokens."""
    chances = acceptance.of_position
    found = [
        Forecast(count, forecast_speedup(chances[:count], costs, draft_s(count)))
        for count in range(1, len(chances) + 1)
    ]
    return max(found, key=lambda each: each.speedup)
