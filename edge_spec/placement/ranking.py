"""Ranks the ways to run a model, and says why each one lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edge_spec.drafters import factory
from edge_spec.fitting.devices import format_bytes
from edge_spec.fitting.forecast import FreeMemory
from edge_spec.placement.plan import Placement

_FEW_RIGHT = 0.4  # of a drafter's draft tokens
_SLOWER_STEP = 1.03  # times the best one's
_MOST_LOSS = 0.005  # nats a token beyond the least: half a percent of perplexity


def ranked(placements: Sequence[Placement], free: FreeMemory) -> tuple[Placement, ...]:
    """Sorts them: the fastest that fits and whose weights say what the model's say comes first,
    each other one has the reason it lost by. A drafter that keeps answers is never chosen: that has
    to be asked for."""
    least = min((each.loss for each in placements if each.loss is not None), default=0.0)

    def is_close(placement: Placement) -> bool:
        return placement.loss is None or placement.loss - least <= _MOST_LOSS

    def may_run(placement: Placement) -> tuple[bool, bool, bool]:
        return (
            not factory.remembers(placement.drafter),
            placement.shortage(free) is None,
            is_close(placement),
        )

    def worth(placement: Placement) -> tuple[tuple[bool, bool, bool], float]:
        return may_run(placement), placement.tokens_per_s or 0.0

    first = max(map(may_run, placements))
    steps = [each.step_s for each in placements if each.step_s and may_run(each) == first]
    against = [_with_speedup(each, min(steps, default=None)) for each in placements]
    best, *others = sorted(against, key=worth, reverse=True)
    return replace(best, reason=""), *(
        replace(each, reason=_reason(each, best, free, is_close(each))) for each in others
    )


def why_no_draft(placements: Sequence[Placement]) -> str | None:
    """Says of placements by their rank what a draft would have to be better at, where the best one
    leaves it out; None where it does not, or where nothing is known of one."""
    best = placements[0]
    paired = next((each for each in placements if each.draft and each.tokens_per_s), None)
    if best.draft is not None or paired is None or best.tokens_per_s is None:
        return None
    return (
        f"the draft does not pay here: {paired.tokens_per_s:.1f} tokens/s with it, "
        f"{best.tokens_per_s:.1f} without. A draft token takes {paired.guess_share or 0.0:.2f} of "
        f"a step, and {paired.acceptance or 0.0:.0%} of them are right"
    )


def _with_speedup(placement: Placement, step_s: float | None) -> Placement:
    """step_s: of the fastest plain step there is."""
    if step_s is None or placement.tokens_per_s is None:
        return placement
    return replace(placement, speedup=placement.tokens_per_s * step_s)


def _reason(each: Placement, best: Placement, free: FreeMemory, is_close: bool) -> str:
    shortage = each.shortage(free)
    if shortage is not None:
        return f"does not fit: {shortage}"
    if each.tokens_per_s is None:  # there was less when it was to be measured
        return f"does not fit: {format_bytes(each.memory_bytes or 0)} are too much"
    if not is_close and (best.loss or 0.0) < (each.loss or 0.0):
        return f"its weights lose {math.expm1(each.loss or 0.0):.1%} of perplexity"
    if factory.remembers(each.drafter):
        return "it keeps answers on the disk, and is used where it is asked for"
    slower = f"{1 - each.tokens_per_s / (best.tokens_per_s or 1.0):.0%} slower"
    step_s, best_s = each.step_s or 0.0, best.step_s or math.inf
    if each.target != best.target and step_s > _SLOWER_STEP * best_s:
        return f"{slower}: a step takes {1e3 * step_s:.3g} ms, not {1e3 * best_s:.3g}"
    if each.drafter == "none":
        return f"{slower}: nothing is drafted"
    if each.acceptance is None:
        return f"{slower}: it found nothing to draft here"
    if each.acceptance < _FEW_RIGHT:
        return f"{slower}: its draft tokens are right too seldom here ({each.acceptance:.0%})"
    row_share, guess_share = each.row_share or 0.0, each.guess_share or 0.0
    if guess_share > row_share:
        return f"{slower}: a draft token takes {guess_share:.2f} of a step"
    return f"{slower}: a row costs {row_share:.2f} of a step"
