"""Relative positions: what a score of attention has added for the distance of its two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RelativePositions:
    """Distances share buckets, the wider the farther they are (Raffel et al. 2020, T5, section
    2.1); each head adds a number of its own for each bucket."""

    num_buckets: int
    max_distance: int  # tokens, from which on all share the last bucket

    def buckets(self, both_ways: bool) -> np.ndarray:
        """Returns [2 * max_distance + 1] int64: of a key that stands -max_distance ...
        max_distance tokens after its query. both_ways: of an encoder, where later tokens have half
        of the buckets; in a decoder no row sees them."""
        after = np.arange(-self.max_distance, self.max_distance + 1)
        if not both_ways:
            return self._near_to_far(np.maximum(-after, 0), self.num_buckets)
        half = self.num_buckets // 2
        found: np.ndarray = (after > 0) * half + self._near_to_far(np.abs(after), half)
        return found

    def _near_to_far(self, distances: np.ndarray, num_buckets: int) -> np.ndarray:
        """One each for the first half, and logarithmic ones; rounded as float32, as training did
        it: some distances are on an edge."""
        exact = num_buckets // 2
        ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
        steps = np.log(ratios) / np.float32(math.log(self.max_distance / exact))
        far = exact + (steps * np.float32(num_buckets - exact)).astype(np.int64)
        found: np.ndarray = np.where(distances < exact, distances, np.minimum(far, num_buckets - 1))
        return found

    def bias(
        self, weight: np.ndarray, rows: np.ndarray, keys: np.ndarray, both_ways: bool = False
    ) -> np.ndarray:
        """Returns [heads, rows, keys] float32. weight: [num_buckets, heads]; rows, keys: the
        positions of queries and keys, int64."""
        after = np.clip(keys - rows[:, None], -self.max_distance, self.max_distance)
        found: np.ndarray = weight[self.buckets(both_ways)[after + self.max_distance]]
        return np.moveaxis(found, -1, 0)
