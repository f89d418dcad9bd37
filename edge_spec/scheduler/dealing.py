"""Divide a shared pass's rows and its time among its conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from edge_spec.scheduler.cost import RowCosts


class Wish(NamedTuple):
    """The rows that one conversation wants scored. values: chance of each row and its ancestors;
    the first is 1. least: guaranteed rows, at least 1."""

    values: Sequence[float]
    least: int = 1


def deal_rows(wishes: Sequence[Wish], room: int, seconds: Callable[[int], float]) -> list[int]:
    """Return how many of its first rows each conversation gets scored.

    Fills at most `room` rows so that the pass commits most tokens per second (Liu et al. 2024,
    Optimizing Speculative Decoding for Serving Large Language Models Using Goodput; Li et al. 2025,
    AdaServe). Ties go to shallower rows, then to earlier wishes. Deterministic. seconds: of a pass
    by its rows.
    """
    if not wishes:
        return []
    dealt = [wish.least for wish in wishes]
    rows = sum(dealt)
    ordered = sorted(
        (-value, row, number)
        for number, wish in enumerate(wishes)
        for row, value in enumerate(accumulate(wish.values, min))  # no row precedes its ancestors
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
    """Return how many of `ordered` to add to `rows`, which bring `tokens`, for most tokens per
    second."""
    best, best_rate = 0, tokens / seconds(rows)
    for added, (lost, _, _) in enumerate(ordered, start=1):
        tokens -= lost
        rate = tokens / seconds(rows + added)
        if rate > best_rate:
            best, best_rate = added, rate
    return best


def charge(costs: RowCosts, rows: Sequence[int], seconds: float) -> list[float]:
    """Return each conversation's charge for a shared pass, given the rows of each.

    It pays an equal part of a pass with one row each, and its extra rows' part of the rest. So a
    row pays for one conversation exactly when it pays for all.
    """
    total = costs.at(sum(rows))
    plain = min(costs.at(len(rows)), total)
    row = (total - plain) / max(1, sum(rows) - len(rows))
    return [seconds * (plain / len(rows) + row * (each - 1)) / total for each in rows]
