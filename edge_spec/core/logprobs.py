"""Describes how likely the model itself found what was written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Score(NamedTuple):
    """Says how likely a token was by the model itself, before penalties and grammar."""

    logprob: float  # natural logarithm
    alternatives: tuple[tuple[int, float], ...]  # the likeliest tokens, the likeliest first


def score_of(logits: np.ndarray, token: int, num_alternatives: int) -> Score:
    """Scores `token` where the model gave these logits, [vocab] float32."""
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    count = min(num_alternatives, len(logprobs))
    least = np.partition(logprobs, -count)[-count] if count else np.inf
    likeliest = np.flatnonzero(logprobs >= least)  # ascending, and more where some tie
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")][:count]
    alternatives = tuple((int(each), float(logprobs[each])) for each in likeliest)
    return Score(float(logprobs[token]), alternatives)
