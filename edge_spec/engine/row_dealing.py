"""Rows of a pass that several conversations share, dealt out by what they are likely to bring.

Where all rows of all trees do not fit, or not all of them pay for the time that they take from
everybody, those are scored that are most likely to be committed, whoever drafted them (Liu et al.
2024, Optimizing Speculative Decoding for Serving Large Language Models Using Goodput; Li et al.
2025, AdaServe: verification by token, across requests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Wish(NamedTuple):
    """Rows that one conversation would have scored.

    values: of each row, the chance that it and all rows above it are right; the first is 1. least:
    rows that it has in any case, at least 1."""

    values: Sequence[float]
    least: int = 1


def deal_rows(
    wishes: Sequence[Wish], room: int, seconds: Callable[[int], float] | None
) -> list[int]:
    """Returns how many of its first rows each has scored: of all ways to fill at most `room` rows,
    the one that commits most tokens a second. Of equally likely rows those that are less deep come
    first, then those of earlier wishes. The same arguments give the same answer.

    seconds: of a pass by its rows; None where that is not known, and all that fits is scored.
    """
    if not wishes:
        return []
    dealt = [wish.least for wish in wishes]
    rows = sum(dealt)
    ordered = sorted(
        (-value, row, number)
        for number, wish in enumerate(wishes)
        for row, value in enumerate(accumulate(wish.values, min))  # no row before those above it
        if row >= wish.least
    )
    ordered = ordered[: max(0, room - rows)]
    if seconds is not None:
        tokens = sum(sum(wish.values[: wish.least]) for wish in wishes)
        ordered = ordered[: _fastest(ordered, tokens, rows, seconds)]
    for _, _, number in ordered:
        dealt[number] += 1
    return dealt


def _fastest(
    ordered: Sequence[tuple[float, int, int]],
    tokens: float,
    rows: int,
    seconds: Callable[[int], float],
) -> int:
    """Returns how many rows to add to `rows`, which bring `tokens`, for most tokens a second."""
    best, best_rate = 0, tokens / seconds(rows)
    for added, (lost, _, _) in enumerate(ordered, start=1):
        tokens -= lost
        rate = tokens / seconds(rows + added)
        if rate > best_rate:
            best, best_rate = added, rate
    return best
