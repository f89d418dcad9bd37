"""Estimates of how likely draft tokens are to be right, by their drafter's word and by what came of
it.

A drafter's confidence is learnt over its whole life (`drafters/acceptance.py`). A text has its own
ways: what was right nine times in ten may be wrong for a page. So draft tokens are counted once
more, by drafter, depth and confidence, with a memory of a few dozen of them: the mean of a Beta
distribution whose prior is the drafter's own word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt

import numpy as np

from edge_spec.core.tree import TokenTree

_CONFIDENCES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)  # the least of each bucket but the first
_DEPTHS = (1, 2, 4, 8)  # likewise
_PRIOR_WEIGHT = 24.0  # draft tokens that the drafter's word counts for
_MEMORY = 1 - 1 / 48  # weight of the draft tokens before, with every further one of its bucket

_COLUMNS = len(_CONFIDENCES) + 1
_NUM_BUCKETS = len(_DEPTHS) * _COLUMNS


class Calibration:
    """Corrects what one drafter says of P(a draft token is right | its parent is)."""

    def __init__(self) -> None:
        self._seen = [0.0] * _NUM_BUCKETS
        self._right = [0.0] * _NUM_BUCKETS
        self._claimed = [0.0] * _NUM_BUCKETS  # sum of the confidences

    def estimate(self, depth: int, confidence: float) -> float:
        """depth: 1 for the first draft token. Between 0 and 1, and 0 or 1 where the confidence
        is."""
        bucket = _bucket(depth, confidence)
        if not self._seen[bucket]:
            return confidence
        # Within a bucket the drafter's word still tells one draft token from another.
        surprise = self._right[bucket] - self._claimed[bucket]
        moved = confidence + surprise / (_PRIOR_WEIGHT + self._seen[bucket])
        return min(max(moved, 0.02 * confidence), 1 - 0.02 * (1 - confidence))

    def observe(self, depth: int, confidence: float, right: bool) -> None:
        bucket = _bucket(depth, confidence)
        self._seen[bucket] = _MEMORY * self._seen[bucket] + 1
        self._right[bucket] = _MEMORY * self._right[bucket] + right
        self._claimed[bucket] = _MEMORY * self._claimed[bucket] + confidence

    @property
    def of_late(self) -> tuple[float, float] | None:
        """Returns the share of the last draft tokens that were right, and its standard deviation,
        where any share was as likely before; None before any was decided."""
        seen, right = sum(self._seen), sum(self._right)
        if not seen:
            return None
        mean = (right + 1) / (seen + 2)
        return right / seen, sqrt(mean * (1 - mean) / (seen + 3))

    def counts(self) -> np.ndarray:
        """[3, buckets] float64: draft tokens, those that were right, and the sum of their
        confidences, each weighted by age."""
        return np.array([self._seen, self._right, self._claimed])


def reach_of(calibration: Calibration, tree: TokenTree) -> list[float]:
    """Returns for each row the chance that it and all rows above it are right."""
    if tree.draft_probs:  # the verdict on a sampled row depends on its drafter's word alone
        reach: list[float] = tree.reach.tolist()
        return reach
    chances, estimate = [1.0], calibration.estimate
    confidence: list[float] = tree.confidence.tolist()
    if tree.is_chain:  # most rounds
        chance = 1.0
        for row in range(1, len(confidence)):
            chance *= estimate(row, confidence[row])
            chances.append(chance)
        return chances
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    for row in range(1, len(confidence)):
        chances.append(chances[parents[row]] * estimate(depths[row], confidence[row]))
    return chances


def reach_beside(
    tree: TokenTree, reach: Sequence[float], other: TokenTree, other_reach: Sequence[float]
) -> list[float]:
    """Returns the same for each row of a chain that was looked up, now that a model has drafted
    another one. Where both have a token it is at least as likely as either says; where they part,
    at most as likely as the model's is wrong: of two continuations one is right. Trees that branch
    stay as they are."""
    if not (tree.is_chain and other.is_chain) or tree.draft_probs or other.draft_probs:
        return list(reach)
    found, chance = [1.0], 1.0
    together = True
    for row in range(1, len(tree)):
        own = reach[row] / reach[row - 1] if reach[row - 1] else 0.0
        if together and row < len(other):
            others = other_reach[row] / other_reach[row - 1] if other_reach[row - 1] else 0.0
            together = bool(tree.tokens[row] == other.tokens[row])
            own = max(own, others) if together else min(own, 1 - others)
        chance *= own
        found.append(chance)
    return found


def learn(calibration: Calibration, tree: TokenTree, text: Sequence[int]) -> None:
    """Counts the draft tokens that the text after the pending token decides."""
    if tree.draft_probs:
        return
    confidence: list[float] = tree.confidence.tolist()
    for row, right in tree.followed(text):
        depth = row if tree.is_chain else int(tree.depths[row])
        calibration.observe(depth, confidence[row], right)


def _bucket(depth: int, confidence: float) -> int:
    row = bisect_right(_DEPTHS, depth) - 1
    return row * _COLUMNS + bisect_right(_CONFIDENCES, confidence)
