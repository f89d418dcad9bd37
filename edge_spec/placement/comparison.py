"""Compares ways to run open models, timed in turns: a plain step with another way to make one, and
a target with its draft beside it.

What each of a pair takes alone is known of profiles. What is not: the other model's data in the
caches, its threads, clocks of a device that had nothing to do, copies between devices, and memory
that both read at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from edge_spec.core.model import HasOwnLoop, Model
from edge_spec.core.tree import TokenTree
from edge_spec.placement.measure import LEAST_S, SEED, Stopwatch, passes_in_turns
from edge_spec.placement.profile import PairFindings

_ROUNDS, _CONTEXT = 16, 32
# Long passes are few, and what else is running changes less of each.
_ENOUGH_S, _LEAST_ROUNDS = 1.5, 3
# Of a library's own loop: kernels of attention change from some hundred tokens on.
_OWN_ROUNDS, _OWN_CONTEXT = 32, 320
SLOWER_THAN_OWN = 1.05  # times a step of it, from which on users hear of it
# Of a pair:
_DRAFT_TOKENS = 4  # of a round
_MOST_BESIDE = 64  # passes of the draft during one of the target
_PAIR_ENOUGH_S = 6.0


def relative_cost(model: Model, width: int) -> float:
    """Returns the time of a pass of `width` rows over one of a single row: of each the lower
    quartile, in turns, since whatever else is running only makes a pass longer."""
    watch = Stopwatch(time.perf_counter)

    def is_enough(seconds: Mapping[int, Sequence[float]]) -> bool:
        return len(seconds[1]) >= _LEAST_ROUNDS and watch.total_s > _ENOUGH_S

    seconds = passes_in_turns(model, (1, width), _CONTEXT, _ROUNDS, watch, is_enough)
    return _quarter(seconds[width]) / _quarter(seconds[1])


def own_loop_cost(model: Model, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Returns our plain step over that of the library's own loop, after as many tokens: of each the
    lower quartile, in turns. None where it has none, or a text of that length does not fit."""
    if not isinstance(model, HasOwnLoop):
        return None
    watch, config = Stopwatch(clock), model.config
    if config.context_length < _OWN_CONTEXT + _OWN_ROUNDS + 1:
        return None
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, config.vocab_size, _OWN_CONTEXT).tolist()
    ours: list[float] = []
    theirs: list[float] = []
    with closing(model.open_session()) as session, closing(model.open_own_loop(tokens)) as loop:
        session.prefill(tokens)

        def step(token: int) -> None:
            session.forward(TokenTree.chain(token))
            session.commit([0])

        for done, token in enumerate(tokens[: _OWN_ROUNDS + 1]):
            taken_s = watch.time(partial(step, token)), watch.time(partial(loop.step, token))
            if done:  # the first passes bind buffers
                ours.append(taken_s[0])
                theirs.append(taken_s[1])
    return _quarter(ours) / _quarter(theirs)


def _quarter(seconds: Sequence[float]) -> float:
    return max(LEAST_S, float(np.quantile(seconds, 0.25)))


@dataclass
class _Seconds:
    """Seconds of each round: of the target's pass, of a pass of the draft among others, of one of
    several rows, of all in turns, and of each while the other model runs."""

    target: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    draft_wide: list[float] = field(default_factory=list)  # a pass of several rows
    target_beside: list[float] = field(default_factory=list)
    draft_beside: list[float] = field(default_factory=list)


def probe_pair(
    target: Model,
    draft: Model,
    on_step: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> PairFindings:
    """Times a round's passes of each model alone, in turns, and at the same time, in rounds that
    follow each other; medians. Of the draft, passes of several rows, too: what a call of its device
    takes is what does not grow with the rows."""
    found = _Seconds()
    watch = Stopwatch(clock)
    wide = min(_DRAFT_TOKENS, draft.capabilities.max_rows)
    with (
        _passes(target, _DRAFT_TOKENS + 1) as verify,
        _passes(draft, 1) as read,
        _passes(draft, wide) as read_wide,
        ThreadPoolExecutor(1) as pool,
    ):
        chain = partial(_times, read, _DRAFT_TOKENS)

        def in_turns() -> None:
            chain()
            verify()

        for done in range(_ROUNDS + 1):
            into = found if done else _Seconds()  # the first passes bind buffers
            read()  # after the other model's pass
            into.draft.append(watch.time(chain) / _DRAFT_TOKENS)
            into.draft_wide.append(watch.time(read_wide))
            verify()
            into.target.append(watch.time(verify))
            into.turns.append(watch.time(in_turns))
            # The draft is busy for as long as the target.
            count = 1 + min(_MOST_BESIDE, int(into.target[-1] / max(LEAST_S, into.draft[-1])))
            beside = pool.submit(Stopwatch(clock).time, partial(_times, read, count))
            into.target_beside.append(watch.time(verify))
            into.draft_beside.append(beside.result() / count)
            on_step(done / _ROUNDS)
            if done >= _LEAST_ROUNDS and watch.total_s > _PAIR_ENOUGH_S:
                break
    return _findings(found, wide)


def _findings(found: _Seconds, wide: int) -> PairFindings:
    target_s, draft_s = max(LEAST_S, median(found.target)), max(LEAST_S, median(found.draft))
    row_s = max(0.0, median(found.draft_wide) - draft_s) / max(1, wide - 1)
    return PairFindings(
        switch_s=max(0.0, median(found.turns) - target_s - _DRAFT_TOKENS * draft_s),
        target_slowdown=max(1.0, median(found.target_beside) / target_s),
        draft_slowdown=max(1.0, median(found.draft_beside) / draft_s),
        call_s=max(0.0, draft_s - row_s),
        row_s=row_s,
    )


def _times(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


@contextmanager
def _passes(model: Model, rows: int) -> Iterator[Callable[[], None]]:
    """Gives a pass of `rows` rows, as a round makes it: its scores are copied, since a device may
    give them when they are read; one row of it is kept, and forgotten again."""
    rng = np.random.default_rng(SEED)
    context = max(1, min(_CONTEXT, model.config.context_length - rows))
    tokens: Sequence[int] = rng.integers(0, model.config.vocab_size, context + rows).tolist()
    tree = TokenTree.chain(tokens[0], tokens[1:rows])
    with closing(model.open_session()) as session:
        session.prefill(tokens[:context])

        def one_pass() -> None:
            session.forward(tree).logits.copy()
            session.commit([0])
            session.rollback(context)

        yield one_pass
