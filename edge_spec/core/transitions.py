"""What a DSpark head (DeepSeek) has beside a DFlash head: which tokens are likelier after a draft
token, and how likely a draft token is to be accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

# Likeliest tokens of a row that are weighed by the token before. To weigh all of them, a matrix as
# long as the vocabulary would be read for each draft token.
SHORTLIST = 512


class FollowsBy(Enum):
    """Says what of a draft token decides which tokens are likelier after it (DSpark)."""

    TOKEN = "vanilla"  # the token
    GATED = "gated"  # the token, of which the state of the row that is scored lets a part through
    RECURRENT = "rnn"  # all draft tokens so far, and the state of the row that is scored


@dataclass(frozen=True, eq=False)
class Transitions:
    """What is likelier after which token: the product of two rows is added to a logit, one of the
    token before, or what is made of it, and one of the token that is scored (DSpark's Markov head).

    joined: what makes more of the row of a token than itself, weight [out, in] and bias [out].
    """

    kind: FollowsBy
    rank: int
    after: Callable[[np.ndarray], np.ndarray]  # [tokens] int of the target -> [tokens, rank]
    scored: Callable[[np.ndarray], np.ndarray]  # [tokens] int that are scored -> [tokens, rank]
    joined: tuple[np.ndarray, np.ndarray] | None = None

    def scoring(self, token_ids: np.ndarray) -> Transitions:
        """Returns those of a head of all tokens that scores these alone: [tokens] int64."""
        rows = self.scored
        return replace(self, scored=lambda places: rows(token_ids[places]))


@dataclass(frozen=True, eq=False)
class Confidence:
    """What a draft token's chance to be accepted is read from: the sum of products, put through
    the logistic function."""

    weight: np.ndarray  # [hidden_size (+ rank)], of a state and of the row of the token before
    bias: float
