"""Learns from outcomes how likely a draft token is to be right: every drafter's confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR_WEIGHT = 60.0  # outcomes that a prior counts for
MEMORY = 512.0  # outcomes after which the older ones count half, and so on
RECENT = 1 - 1 / 24  # weight of the outcomes before, in what this part of the text is like
LONG_WEIGHT = 8.0  # recent outcomes that all others together count for


class OutcomeRate:
    """Counts how often something was right, beginning with a prior. Whenever MEMORY outcomes were
    seen, all of them count half from then on."""

    def __init__(self, prior: float, prior_weight: float) -> None:
        self.seen = prior_weight
        self.right = prior_weight * prior

    def observe(self, right: bool, seen: float = 1.0) -> None:
        if self.seen >= MEMORY:
            self.seen /= 2
            self.right /= 2
        self.seen += seen
        self.right += right


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
        self._long = [OutcomeRate(prior, PRIOR_WEIGHT) for prior in priors]
        self._recent_seen = [0.0] * len(priors)
        self._recent_right = [0.0] * len(priors)
        self._estimates = list(priors)

    def estimate(self, kind: int) -> float:
        return self._estimates[kind]

    def observe(self, kind: int, right: bool) -> None:
        self._long[kind].observe(right)
        self._recent_seen[kind] = RECENT * self._recent_seen[kind] + 1
        self._recent_right[kind] = RECENT * self._recent_right[kind] + right
        self._update(kind)

    def begin_text(self) -> None:
        """Forgets what was recent: it belongs to another text."""
        kinds = range(len(self._long))
        self._recent_seen = [0.0 for _ in kinds]
        self._recent_right = [0.0 for _ in kinds]
        for kind in kinds:
            self._update(kind)

    def _update(self, kind: int) -> None:
        rate = self._long[kind]
        long = LONG_WEIGHT * rate.right / rate.seen
        seen = LONG_WEIGHT + self._recent_seen[kind]
        self._estimates[kind] = (long + self._recent_right[kind]) / seen

    def stats(self) -> np.ndarray:
        """[2, kinds] float64: outcomes counted and those that were right, of all texts."""
        return self.snapshot()[:2]

    def load_stats(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no counts of such a drafter."""
        kinds = len(self._long)
        if counts.size != 2 * kinds:
            raise ValueError(f"acceptance counts of {counts.size // 2} kinds instead of {kinds}")
        self.restore(np.concatenate([counts.reshape(2, kinds), np.zeros((2, kinds))]))

    def snapshot(self) -> np.ndarray:
        """[4, kinds] float64: outcomes counted and those that were right, of all and of late."""
        seen, right = [rate.seen for rate in self._long], [rate.right for rate in self._long]
        return np.array([seen, right, self._recent_seen, self._recent_right])

    def restore(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no counts of such a drafter."""
        if counts.shape != (4, len(self._long)):
            raise ValueError(f"acceptance counts of shape {counts.shape}")
        for seen, right in (counts[:2], counts[2:]):
            if not (np.isfinite(seen) & (right >= 0) & (right <= seen)).all():
                raise ValueError("acceptance counts that are none")
        if not (counts[0] > 0).all():
            raise ValueError("acceptance counts without a prior")
        all_seen, all_right, self._recent_seen, self._recent_right = counts.tolist()
        for kind, rate in enumerate(self._long):
            rate.seen, rate.right = all_seen[kind], all_right[kind]
            self._update(kind)
