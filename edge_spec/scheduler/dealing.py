"""Deals the rows of a pass out to the conversations that share it, and its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from edge_spec.scheduler.cost import RowCosts


class Wish(NamedTuple):
    """Rows that one conversation would have scored.

    values: of each row, the chance that it and all rows above it are right; the first is 1. least:
    rows that it has in any case, at least 1."""

    values: Sequence[float]
    least: int = 1


def deal_rows(wishes: Sequence[Wish], room: int, seconds: Callable[[int], float]) -> list[int]:
    """Return how many of its first rows each has scored, by what they are likely to bring (Liu et
    al. 2024, Optimizing Speculative Decoding for Serving Large Language Models Using Goodput; Li et
    al. 2025, AdaServe: verification by token, across requests): of all ways to fill at most `room`
    rows, the one that commits most tokens a second. Of equally likely rows those that are less deep
    come first, then those of earlier wishes. The same arguments give the same answer.

    seconds: of a pass by its rows.
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
    tokens = sum(sum(wish.values[: wish.least]) for wish in wishes)
    for _, _, number in ordered[: _fastest(ordered, tokens, rows, seconds)]:
        dealt[number] += 1
    return dealt


def _fastest(
    ordered: Sequence[tuple[float, int, int]],
    tokens: float,
    rows: int,
    seconds: Callable[[int], float],
) -> int:
    """Return how many rows to add to `rows`, which bring `tokens`, for most tokens a second."""
    best, best_rate = 0, tokens / seconds(rows)
    for added, (lost, _, _) in enumerate(ordered, start=1):
        tokens -= lost
        rate = tokens / seconds(rows + added)
        if rate > best_rate:
            best, best_rate = added, rate
    return best


def charge(costs: RowCosts, rows: Sequence[int], seconds: float) -> list[float]:
    """Return what of a shared pass each conversation is charged for: an equal part of what a pass
    of a row each takes, and its further rows' part of what these take on top of that. So a row is
    worth it to a conversation where it is to all. rows: of each conversation."""
    total = costs.at(sum(rows))
    plain = min(costs.at(len(rows)), total)
    row = (total - plain) / max(1, sum(rows) - len(rows))
    return [seconds * (plain / len(rows) + row * (each - 1)) / total for each in rows]
