"""Finds how much of a text repeats one passage, which every n-gram drafter foretells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 128  # tokens of a passage
MIN_OCCURRENCES = 3


def tokens_in_loops(tokens: Sequence[int]) -> int:
    """Counts the tokens that lie in loops."""
    return int(in_loops(tokens).sum())


def in_loops(tokens: Sequence[int]) -> np.ndarray:
    """[tokens] bool: which of them lie in loops.

    A loop is a stretch of the text in which each token equals the one `period` tokens before it,
    for a period of at most MAX_PERIOD tokens, and which is at least MIN_OCCURRENCES periods long.
    The first occurrence of the passage is no part of it: nothing foretold it. Takes time
    proportional to the text's length times MAX_PERIOD.
    """
    text = np.asarray(tokens, np.int64)
    in_loop: np.ndarray = np.zeros(len(text), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(text) // MIN_OCCURRENCES) + 1):
        repeats = text[period:] == text[:-period]
        for start, end in _runs(repeats):
            if end - start >= (MIN_OCCURRENCES - 1) * period:
                in_loop[period + start : period + end] = True
    return in_loop


def _runs(values: np.ndarray) -> np.ndarray:
    """[runs, 2]: where true values begin that stand next to each other, and where they end."""
    edges = np.flatnonzero(np.diff(values.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2)
