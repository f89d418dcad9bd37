"""Tries the best forecasts for real before a plan is kept.

A forecast leaves out what Python does in a round, what two models take from each other, and that
one process of a machine is slower than the next. So whoever is first has to write texts, in turns
with plain decoding and with what would draft without a plan; where it loses, the winner of these is
the first, until the first is one that has been tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.models.devices import format_bytes
from edge_spec.models.memory import FreeMemory
from edge_spec.placement.place_work import OnStep, PlaceError
from edge_spec.placement.replay import Recording
from edge_spec.scheduler.plan_file import Place, Placement
from edge_spec.scheduler.profile import was_busy

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


TRIAL_S = 12.0  # of all answers of one trial, as forecast
_MOST_TRIALS = 3
_PROMPTS = 3  # the shortest
_LEAST_TOKENS, _MOST_TOKENS = 16, 64  # of an answer
_WHAT = "Trying the best of them"
# Over the default, from which on another way is a clear winner: on texts of other
# kinds another drafter may be the best, while plain decoding is the same on all.
_CLEARLY, _NOISE = 1.1, 1.03
_TRIED = 3  # placements, beside plain decoding and the default

Prompts = Sequence[Sequence[int]]
# Placements of one target at one place, and of one draft at most; prompts; tokens of each answer;
# what is told the share that is done -> the tokens a second that each placement wrote. Raises
# PlaceError.
Trial = Callable[[Sequence[Placement], Prompts, int, OnStep], Sequence[float]]


@dataclass
class Trials:
    """Those of one plan.

    defaults: who would draft without a plan and without a draft, by the target's place. notes: a
    line for each forecast that was not kept. is_certain: whether plain decoding took about as long
    as its passes did when they were measured; on a machine that is busy nothing can be compared.
    """

    trial: Trial
    free: FreeMemory
    defaults: Mapping[Place, str]
    recordings: Sequence[Recording]
    progress: Progress
    notes: list[str] = field(default_factory=list)
    is_certain: bool = True

    def settle(self, found: Sequence[Placement]) -> tuple[Placement, ...]:
        """Ranks them; the first one was tried, if anything was, and where it is no clear winner,
        it is what drafts without a plan."""
        return self._usual_first(self._tried_ranking(found))

    def _tried_ranking(self, found: Sequence[Placement]) -> tuple[Placement, ...]:
        prompts = sorted((each.prompt for each in self.recordings), key=len)[:_PROMPTS]
        ranking = ranked(found, self.free)
        for _ in range(_MOST_TRIALS):
            first = ranking[0]
            if first.is_measured or not _can_run(first, self.free):
                return ranking
            chosen = self._contestants(ranking)
            length, on_step = num_tokens(chosen, len(prompts)), partial(self.progress, _WHAT)
            try:
                rates = self.trial(chosen, prompts, length, on_step)
            except PlaceError as error:
                self.notes.append(f"{first}: {error}")
                left = [each for each in ranking if _places(each) != _places(first)]
                if not left:
                    return ranking
                ranking = ranked(left, self.free)
                continue
            share = _plain_share(chosen, rates)
            if was_busy(1 / share - 1):
                self.is_certain = False
                self.notes.append(
                    f"{first.target}: plain decoding took {1 / share:.1f} times as long as its "
                    "passes before, the machine was busy: plan again when it is free"
                )
            ranking = ranked(list(_corrected(ranking, chosen, rates, share)), self.free)
            self._tell(first, ranking)
        return self._tried_first(ranking)

    def _contestants(self, ranking: Sequence[Placement]) -> list[Placement]:
        """The first one, the next ones that the same open models can be, and what it has to be
        faster than."""
        first, alone = ranking[0], (ranking[0].target, None)
        alike = [
            each
            for each in ranking
            if _places(each) in (_places(first), alone) and _can_run(each, self.free)
        ]
        judges = ("none", self.defaults.get(first.target))
        asked = [each for each in alike if each.draft is None and each.drafter in judges]
        return alike[:_TRIED] + [each for each in asked if each not in alike[:_TRIED]]

    def _tell(self, first: Placement, ranking: Sequence[Placement]) -> None:
        wrote = next(each for each in ranking if _is_same(each, first))
        best = ranking[0]
        if not _is_same(best, first) and best.is_measured:
            self.notes.append(
                f"{first}: {first.tokens_per_s:.1f} tokens/s were forecast and "
                f"{wrote.tokens_per_s:.1f} written, {best.tokens_per_s:.1f} with {best.drafter}"
                f"{'' if best.draft else ' and no draft' if first.draft else ''}"
            )

    def _tried_first(self, ranking: Sequence[Placement]) -> tuple[Placement, ...]:
        """Where there was no time to try the first, the best of those that were takes its place."""
        best = next((each for each in ranking if each.is_measured), None)
        if best is None or best is ranking[0]:
            return tuple(ranking)
        return _moved_first(best, ranking, "a forecast that was not tried")

    def _usual_first(self, ranking: tuple[Placement, ...]) -> tuple[Placement, ...]:
        first = ranking[0]
        names = self.defaults.get(first.target)
        usual = next(
            (
                each
                for each in ranking
                if (each.target, each.draft, each.drafter) == (first.target, None, names)
            ),
            first,
        )
        if usual is first or not usual.is_measured:
            return ranking
        gain = (first.tokens_per_s or 0.0) / (usual.tokens_per_s or 1.0)
        if gain >= (_NOISE if first.drafter == "none" else _CLEARLY):
            return ranking
        return _moved_first(
            usual, ranking, "no faster than other texts may turn it: the default stays"
        )


def _moved_first(
    best: Placement, ranking: Sequence[Placement], reason: str
) -> tuple[Placement, ...]:
    """reason: why those do not come first that are faster."""
    others = [each for each in ranking if each is not best]
    for i, each in enumerate(others):
        is_faster = (each.tokens_per_s or 0.0) > (best.tokens_per_s or 0.0)
        if is_faster and i < ranking.index(best) and not factory.remembers(each.drafter):
            others[i] = replace(each, reason=reason)
    return replace(best, reason=""), *others


def num_tokens(chosen: Sequence[Placement], num_prompts: int) -> int:
    """Returns the tokens of each answer, by which all of them take about `TRIAL_S`."""
    token_s = sum(1 / each.tokens_per_s for each in chosen if each.tokens_per_s)
    return max(_LEAST_TOKENS, min(_MOST_TOKENS, int(TRIAL_S / (token_s * num_prompts))))


def _plain_share(chosen: Sequence[Placement], rates: Sequence[float]) -> float:
    """Returns what plain decoding wrote, over what was forecast for it."""
    for each, rate in zip(chosen, rates, strict=True):
        if each.drafter == "none" and each.tokens_per_s:
            return rate / each.tokens_per_s
    return 1.0


def _corrected(
    ranking: Sequence[Placement],
    chosen: Sequence[Placement],
    rates: Sequence[float],
    share: float,
) -> Iterator[Placement]:
    """Gives them with what was written; other forecasts for the same place are changed by `share`,
    by which plain decoding there turned out to be faster or slower."""
    wrote = {_identity(each): rate for each, rate in zip(chosen, rates, strict=True)}
    target = chosen[0].target
    for each in ranking:
        if each.target != target or each.tokens_per_s is None:
            yield each
            continue
        forecast = each.tokens_per_s * (1.0 if each.is_measured else share)
        rate = wrote.get(_identity(each))
        yield replace(
            each,
            tokens_per_s=forecast if rate is None else rate,
            is_measured=each.is_measured or rate is not None,
            step_s=each.step_s and each.step_s / share,
        )


def _identity(placement: Placement) -> tuple[Place, Place | None, str]:
    return placement.target, placement.draft, placement.drafter


def _places(placement: Placement) -> tuple[Place, Place | None]:
    return placement.target, placement.draft


def _is_same(one: Placement, other: Placement) -> bool:
    return _identity(one) == _identity(other)


def _can_run(placement: Placement, free: FreeMemory) -> bool:
    is_known = placement.tokens_per_s is not None and not factory.remembers(placement.drafter)
    return is_known and placement.shortage(free) is None
