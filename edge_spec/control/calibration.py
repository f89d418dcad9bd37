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
_TEXT_MEMORY = 1 - 1 / 24  # weight of the texts before, with every further one
_PRIOR_TEXTS, _BETWEEN = 1.0, 0.1  # texts that a first estimate of their spread counts for
_LEAST_WEIGHT, _MOST_WEIGHT = 1.5, 100.0
_MEMORY = 1 - 1 / 48  # weight of the draft tokens before, with every further one of its bucket

_COLUMNS = len(_CONFIDENCES) + 1
_NUM_BUCKETS = len(_DEPTHS) * _COLUMNS


class Calibration:
    """Corrects what one drafter says of P(a draft token is right | its parent is)."""

    def __init__(self) -> None:
        self._seen = [0.0] * _NUM_BUCKETS
        self._right = [0.0] * _NUM_BUCKETS
        self._claimed = [0.0] * _NUM_BUCKETS  # sum of the confidences
        # Of this text: draft tokens, and how many more of them were right than was expected.
        self._text_seen = self._text_surprise = self._text_chance = self._text_expected = 0.0
        # Of texts before: their number, squares of their mean surprises, and what chance adds.
        self._texts, self._squares, self._chance = _PRIOR_TEXTS, _PRIOR_TEXTS * _BETWEEN**2, 0.0
        self._spread = _PRIOR_TEXTS * 0.25

    def begin_text(self) -> None:
        """Counts the text before as one of many."""
        if count := self._text_seen:
            self._texts = _TEXT_MEMORY * self._texts + 1
            self._squares = _TEXT_MEMORY * self._squares + (self._text_surprise / count) ** 2
            self._chance = _TEXT_MEMORY * self._chance + self._text_chance / count**2
            self._spread = _TEXT_MEMORY * self._spread + self._text_chance / count
        self._text_seen = self._text_surprise = self._text_chance = self._text_expected = 0.0

    @property
    def _text_weight(self) -> float:
        """Draft tokens of a text that the texts before count for: few where texts differ."""
        between = max(0.0, self._squares - self._chance)
        if between * _MOST_WEIGHT <= self._spread:
            return _MOST_WEIGHT
        return max(self._spread / between, _LEAST_WEIGHT)

    @property
    def of_text(self) -> tuple[float, float] | None:
        """Returns the share of this text's draft tokens that were right, and its deviation; None
        before any was decided."""
        seen = self._text_seen
        if not seen:
            return None
        return (self._text_expected + self._text_surprise) / seen, sqrt(self._text_chance) / seen

    def estimate(self, depth: int, confidence: float) -> float:
        """depth: 1 for the first draft token. Between 0 and 1, and 0 or 1 where the confidence
        is."""
        moved = self._of_all(depth, confidence)
        if self._text_seen:
            shift = self._text_surprise / (self._text_weight + self._text_seen)
            mean = self._text_expected / self._text_seen
            if shift < 0:
                moved *= 1 + shift / mean
            else:
                moved += (1 - moved) * shift / (1 - mean)
        return min(max(moved, 0.02 * confidence), 1 - 0.02 * (1 - confidence))

    def _of_all(self, depth: int, confidence: float) -> float:
        """Returns the estimate of all texts."""
        bucket = _bucket(depth, confidence)
        # Within a bucket the drafter's word still tells one draft token from another.
        surprise = self._right[bucket] - self._claimed[bucket]
        moved = confidence + surprise / (_PRIOR_WEIGHT + self._seen[bucket])
        return min(max(moved, 0.02 * confidence), 1 - 0.02 * (1 - confidence))

    def observe(self, depth: int, confidence: float, right: bool) -> None:
        bucket = _bucket(depth, confidence)
        expected = self._of_all(depth, confidence)
        self._text_seen += 1
        self._text_surprise += right - expected
        self._text_expected += expected
        self._text_chance += expected * (1 - expected)
        self._seen[bucket] = _MEMORY * self._seen[bucket] + 1
        self._right[bucket] = _MEMORY * self._right[bucket] + right
        self._claimed[bucket] = _MEMORY * self._claimed[bucket] + confidence

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
