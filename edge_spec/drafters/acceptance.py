"""How likely a guess is to be right, learnt from outcomes: the confidence of every drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR_WEIGHT = 12.0  # outcomes that a prior counts for
MEMORY = 512.0  # outcomes after which the older ones count half, and so on


class LearntAcceptance:
    """P(a guess is right | its parent is) for each of a drafter's kinds of guess, by number.

    The mean of a Beta distribution per kind. Drafters count every guess that the text decides,
    whether or not it was verified, so a kind that is not worth verifying now is still learnt
    about.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._seen = [PRIOR_WEIGHT] * len(priors)
        self._right = [PRIOR_WEIGHT * prior for prior in priors]

    def estimate(self, kind: int) -> float:
        return self._right[kind] / self._seen[kind]

    def observe(self, kind: int, right: bool) -> None:
        if self._seen[kind] >= MEMORY:
            self._seen[kind] /= 2
            self._right[kind] /= 2
        self._seen[kind] += 1
        self._right[kind] += right

    def snapshot(self) -> np.ndarray:
        """[2, kinds] float64: outcomes counted, and those that were right."""
        return np.array([self._seen, self._right])

    def restore(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no counts of such a drafter."""
        if counts.shape != (2, len(self._seen)):
            raise ValueError(f"acceptance counts of shape {counts.shape}")
        seen, right = counts
        if not (np.isfinite(seen) & (seen > 0) & (right >= 0) & (right <= seen)).all():
            raise ValueError("acceptance counts that are none")
        self._seen, self._right = counts.tolist()
