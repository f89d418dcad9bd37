"""Measures how many of a drafter's tokens would be accepted in what the target wrote by itself.

Whatever a drafter has proposed before a position is the target's own text if it was accepted. So
drafts from every place of a text, each after the target's own tokens, show what would be accepted:
position i counts only where all before it were right.

Rounds do not begin at every place. One that begins just after a token that was not foreseen begins
at a harder place than most, so a round commits fewer tokens than those shares say: rounds are
counted as they would be decoded, each from where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.control.cost import RowCosts


@dataclass(frozen=True)
class Acceptance:
    """of_position: by position, given that all before it were accepted; from every place.
    tokens_a_round: with 1, 2, ... draft tokens a round, the target's own token included."""

    of_position: tuple[float, ...]
    tokens_a_round: tuple[float, ...]


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
    counts = range(1, right.shape[1] + 1)
    of_rounds = tuple(_tokens_a_round(drafts, count) for count in counts)
    return Acceptance(tuple(found), of_rounds)


def _tokens_a_round(drafts: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> float:
    """Returns the tokens of a round with `count` draft tokens."""
    tokens = rounds = 0
    for drafted, written in drafts:
        right = (drafted == written) & (written >= 0)
        accepted = np.cumprod(right[:, :count], axis=1).sum(axis=1).tolist()
        places = int((written[:, 0] >= 0).sum())
        at = 0
        while at < places:
            at += accepted[at] + 1
            rounds += 1
        tokens += places
    return tokens / rounds if rounds else 1.0


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


def best_chain(
    acceptance: Acceptance, costs: RowCosts, draft_s: Callable[[int], float]
) -> Forecast:
    """Returns the best number of draft tokens by the measured times of passes here. draft_s:
    seconds of a chain by its number of tokens."""
    widest = len(acceptance.tokens_a_round) + 1
    # A plain step may be widened as well: that one row was measured slower than two is no gain.
    plain_s = min(costs.at(rows) for rows in range(1, widest + 1))
    found = [
        Forecast(count, tokens * plain_s / (costs.at(count + 1) + draft_s(count)))
        for count, tokens in enumerate(acceptance.tokens_a_round, start=1)
    ]
    return max(found, key=lambda each: each.speedup)
