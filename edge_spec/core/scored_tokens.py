"""The tokens that a draft scores, where others are left out of its output matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScoredTokens:
    """Names some of a vocabulary. ids: [tokens] int32 as bytes, in rising order, none twice."""

    ids: bytes

    @classmethod
    def of(cls, ids: Iterable[int]) -> ScoredTokens:
        """Takes them in any order."""
        return cls(np.array(sorted(set(ids)), np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.ids) // np.dtype(np.int32).itemsize

    def __str__(self) -> str:
        """Returns what differs wherever the tokens do."""
        return f"{len(self)} tokens {hashlib.sha256(self.ids).hexdigest()[:12]}"
