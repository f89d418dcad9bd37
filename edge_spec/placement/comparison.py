"""Compares a plain step with another way to make one, timed in turns on an open model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from edge_spec.core.model import HasOwnLoop, Model
from edge_spec.core.tree import TokenTree
from edge_spec.placement.measure import LEAST_S, SEED, Stopwatch

_COMPARED_ROUNDS, _COMPARED_CONTEXT = 16, 32  # of one row and of a plain step's width
# Long passes are few, and what else is running changes less of each.
_ENOUGH_S, _LEAST_ROUNDS = 1.5, 3
# Of a library's own loop: kernels of attention change from some hundred tokens on.
_OWN_ROUNDS, _OWN_CONTEXT = 32, 320
SLOWER_THAN_OWN = 1.05  # times a step of it, from which on users hear of it


def relative_cost(
    model: Model, width: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the time of a pass of `width` rows over one of a single row: of each the lower
    quartile, in turns, since whatever else is running only makes a pass longer."""
    watch, config = Stopwatch(clock), model.config
    room = max(1, config.context_length - width)
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, config.vocab_size, _COMPARED_CONTEXT + width).tolist()
    seconds: dict[int, list[float]] = {1: [], width: []}
    with closing(model.open_session()) as session:
        session.prefill(tokens[: min(_COMPARED_CONTEXT, room)])
        for done in range(_COMPARED_ROUNDS + 1):
            for rows, found in seconds.items():
                tree = TokenTree.chain(tokens[0], tokens[1:rows])
                pass_s = watch.time(partial(session.forward, tree))
                if done:  # the first passes bind buffers
                    found.append(pass_s)
            if done >= _LEAST_ROUNDS and watch.total_s > _ENOUGH_S:
                break
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
