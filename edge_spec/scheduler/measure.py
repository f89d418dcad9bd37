"""Measure t(k), the seconds of a pass of k rows: for a stored profile, or quickly without one.

Compared works run in turn, in shuffled order, so that other load slows all alike. Medians ignore
what disturbed a few passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.profile import Profile

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_FEW_WIDTHS = (1, 2, 4, 8, 16)  # for slow models
_SLOW_STEP = 1 / 300  # share of the measuring time; longer steps are slow
CONTEXT = 256  # tokens; the middle of a usual answer
_SPREAD = 0.04  # of the least certain median; measuring stops below it
_LEAST_ROUNDS = 2  # one round does not show its uncertainty
USUAL_ROUNDS, _MOST_ROUNDS = 6, 40  # at least and at most, if time allows
SEED = 0
_LEAST_S = 1e-9  # for coarse clocks

# Without a profile:
QUICK_WIDTHS = (1, 2, 4, 8)
_QUICK_ROUNDS = 3
_QUICK_CONTEXT = 16  # tokens
_SLOW_PASS_S = 0.25  # of any width; one pass of each then suffices

_COMPARED_ROUNDS, _QUARTERED = 16, 3  # most and fewest rounds for comparing two widths
_ENOUGH_S = 1.5  # of all passes; long ones are few and less disturbed

_Name = TypeVar("_Name")
Found = Mapping[_Name, Sequence[float]]  # seconds by work


class Stopwatch:
    """Adds up the time of works, by any clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.total_s = 0.0

    def time(self, work: Callable[[], object]) -> float:
        start = self._clock()
        work()
        taken_s = self._clock() - start
        self.total_s += taken_s
        return taken_s


def in_turns(
    works: Mapping[_Name, Callable[[], object]],
    rounds: int,
    watch: Stopwatch,
    is_enough: Callable[[Found[_Name]], bool] = lambda seconds: False,
) -> dict[_Name, list[float]]:
    """Return the seconds of works by name, for `rounds` rounds or until `is_enough`. A warm-up
    round comes first, which binds buffers."""
    seconds: dict[_Name, list[float]] = {name: [] for name in works}
    names, rng = list(works), np.random.default_rng(SEED)
    for done in range(rounds + 1):
        for at in rng.permutation(len(names)):
            taken_s = watch.time(works[names[at]])
            if done:
                seconds[names[at]].append(taken_s)
        if done and is_enough(seconds):
            break
    return seconds


@contextmanager
def _steps(
    model: Model, widths: Sequence[int], context: int
) -> Iterator[dict[int, Callable[[], None]]]:
    """Yield each ascending width's pass, after a text of at most `context` tokens. As in a round,
    logits are copied (some devices compute them when read) and a row is committed."""
    held = min(context, max(1, model.config.context_length - widths[-1]))
    tokens = _tokens(model, held + widths[-1])
    with closing(model.open_session()) as session:
        session.prefill(tokens[:held])

        def step(tree: TokenTree) -> None:
            session.forward(tree).logits.copy()
            session.commit([0])
            session.rollback(held)

        trees = {width: TokenTree.chain(tokens[0], tokens[1:width]) for width in widths}
        yield {width: partial(step, tree) for width, tree in trees.items()}


def _tokens(model: Model, count: int) -> list[int]:
    """Return random tokens, since their logits decide nothing. In a mixture of experts they touch
    more experts than most texts, which overestimates wide passes."""
    rng = np.random.default_rng(SEED)
    tokens: list[int] = rng.integers(0, model.config.vocab_size, count).tolist()
    return tokens


def _fitting(model: Model, widths: Sequence[int]) -> list[int]:
    most = min(model.capabilities.max_rows, model.config.context_length // 2)
    return [width for width in widths if width <= most] or [1]


def uncertainty(seconds: Sequence[float]) -> float:
    """Return half the 95% interval of a median, over the median, by quartiles (McGill, Tukey and
    Larsen 1978, Variations of Box Plots)."""
    lower, middle, upper = np.quantile(seconds, [0.25, 0.5, 0.75])
    return float(1.57 * (upper - lower) / (max(middle, _LEAST_S) * len(seconds) ** 0.5))


def median_seconds(passes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {rows: max(_LEAST_S, median(seconds)) for rows, seconds in passes.items()}


def spread(passes: Mapping[int, Sequence[float]]) -> float:
    return max(map(uncertainty, passes.values()))


def measure(
    model: Model,
    max_s: float,
    on_step: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure until every median is certain to _SPREAD, or `max_s` passed and each width ran twice.

    Uses its own session. A runtime's overhead per pass is part of t(1). on_step: receives the share
    done, 0 to 1, after every round.
    """
    watch = Stopwatch(clock)

    def is_enough(passes: Found[int]) -> bool:
        done = len(passes[1])
        on_step(min(1.0, max(watch.total_s / max_s, done / _MOST_ROUNDS)))
        is_certain = done >= USUAL_ROUNDS and spread(passes) <= _SPREAD
        return is_certain or (done >= _LEAST_ROUNDS and watch.total_s >= max_s)

    with _steps(model, _fitting(model, WIDTHS), CONTEXT) as steps:
        on_step(0.0)
        first_s = in_turns({1: steps[1]}, 2, Stopwatch(clock))[1]
        if min(first_s) > _SLOW_STEP * max_s:
            steps = {width: steps[width] for width in _FEW_WIDTHS if width in steps}
        passes = in_turns(steps, _MOST_ROUNDS, watch, is_enough)
    return Profile(median_seconds(passes), len(passes[1]), spread(passes))


def quick_passes(
    model: Model,
    widths: Sequence[int] = QUICK_WIDTHS,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = _QUICK_ROUNDS,
    least: int = 1,
) -> dict[int, list[float]]:
    """Return the seconds of passes by rows, after a short prompt.

    Takes as long as 80 plain steps if a row costs a quarter of one, and as 15 of a slow model, with
    `least` passes of each width.
    """
    watch = Stopwatch(clock)

    def is_enough(passes: Found[int]) -> bool:
        if min(map(len, passes.values())) < least:
            return False
        return watch.total_s > _ENOUGH_S or max(map(max, passes.values())) > _SLOW_PASS_S

    with _steps(model, _fitting(model, widths), _QUICK_CONTEXT) as steps:
        return in_turns(steps, rounds, watch, is_enough)


def relative_cost(model: Model, width: int) -> float:
    """Return the time of a pass of `width` rows over one of a single row."""
    passes = quick_passes(model, (1, width), rounds=_COMPARED_ROUNDS, least=_QUARTERED)
    return _quarter(passes[width]) / _quarter(passes[1])


def _quarter(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other load only makes a pass longer."""
    return max(_LEAST_S, float(np.quantile(seconds, 0.25)))
