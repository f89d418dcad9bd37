"""How likely a draft token is to be right, learnt from outcomes: the confidence of every
drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR_WEIGHT = 60.0  # outcomes that a prior counts for
MEMORY = 512.0  # outcomes after which the older ones count half, and so on
RECENT = 1 - 1 / 24  # weight of the outcomes before, in what this part of the text is like
LONG_WEIGHT = 8.0  # recent outcomes that all others together count for


class LearntAcceptance:
    """P(a draft token is right | its parent is) for each of a drafter's kinds of draft token, by
    number.

    The mean of a Beta distribution per kind, twice: over all outcomes, and with that as its prior
    over the recent ones, since texts differ more than a single rate can tell: what holds for a
    translation is wrong for the summary after it, and has to be unlearnt within a few dozen tokens.
    Drafters count every draft token that the text decides, whether or not it was verified, so a
    kind that is not worth verifying now is still learnt about.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._seen = [PRIOR_WEIGHT] * len(priors)
        self._right = [PRIOR_WEIGHT * prior for prior in priors]
        self._recent_seen = [0.0] * len(priors)
        self._recent_right = [0.0] * len(priors)
        self._estimates = list(priors)

    def estimate(self, kind: int) -> float:
        return self._estimates[kind]

    def observe(self, kind: int, right: bool) -> None:
        if self._seen[kind] >= MEMORY:
            self._seen[kind] /= 2
            self._right[kind] /= 2
        self._seen[kind] += 1
        self._right[kind] += right
        self._recent_seen[kind] = RECENT * self._recent_seen[kind] + 1
        self._recent_right[kind] = RECENT * self._recent_right[kind] + right
        self._update(kind)

    def begin_text(self) -> None:
        """What was recent belongs to another text."""
        kinds = range(len(self._seen))
        self._recent_seen = [0.0 for _ in kinds]
        self._recent_right = [0.0 for _ in kinds]
        for kind in kinds:
            self._update(kind)

    def _update(self, kind: int) -> None:
        long = LONG_WEIGHT * self._right[kind] / self._seen[kind]
        seen = LONG_WEIGHT + self._recent_seen[kind]
        self._estimates[kind] = (long + self._recent_right[kind]) / seen

    def stats(self) -> np.ndarray:
        """[2, kinds] float64: outcomes counted and those that were right, of all texts."""
        return np.array([self._seen, self._right])

    def load_stats(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no counts of such a drafter."""
        kinds = len(self._seen)
        if counts.size != 2 * kinds:
            raise ValueError(f"acceptance counts of {counts.size // 2} kinds instead of {kinds}")
        self.restore(np.concatenate([counts.reshape(2, kinds), np.zeros((2, kinds))]))

    def snapshot(self) -> np.ndarray:
        """[4, kinds] float64: outcomes counted and those that were right, of all and of late."""
        return np.array([self._seen, self._right, self._recent_seen, self._recent_right])

    def restore(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no counts of such a drafter."""
        if counts.shape != (4, len(self._seen)):
            raise ValueError(f"acceptance counts of shape {counts.shape}")
        for seen, right in (counts[:2], counts[2:]):
            if not (np.isfinite(seen) & (right >= 0) & (right <= seen)).all():
                raise ValueError("acceptance counts that are none")
        if not (counts[0] > 0).all():
            raise ValueError("acceptance counts without a prior")
        self._seen, self._right, self._recent_seen, self._recent_right = counts.tolist()
        for kind in range(len(self._seen)):
            self._update(kind)
