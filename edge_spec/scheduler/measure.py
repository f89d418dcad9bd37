"""Measures t(k): a profile that is kept, or in a moment what a model without one begins with.

Everything that is compared is measured in turns, in shuffled order, so that a machine that gets
busy slows all of it alike; medians leave out what disturbed a few passes. So are a plain step with
another way to make one, and a target with its draft beside it.

What each of a pair takes alone is known of profiles. What is not: the other model's data in the
caches, its threads, clocks of a device that had nothing to do, copies between devices, and memory
that both read at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from edge_spec.core.model import HasOwnLoop, Model, Session
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.profile import (
    LEAST_S,
    USUAL_DRAFT_TOKENS,
    ContextCosts,
    PairFindings,
    Profile,
)

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_FEW_WIDTHS = (1, 2, 4, 8, 16)  # for models that are slow
_ROUND_STEPS = 70.0  # that a round of WIDTHS takes at both contexts, if a row adds 0.2 of one
_CONTEXTS = (32, 1024)  # tokens
_SPREAD = 0.04  # of the least certain median, at which no more rounds are made
_LEAST_ROUNDS = 2  # however long they take: one alone does not tell how certain it is
USUAL_ROUNDS, _MOST_ROUNDS = 6, 40  # at least and at most, where there is the time
_PREFILL_TOKENS = 256  # of one pass, at most
_FIRST_STEPS = 3  # the first ones bind buffers
_PREFILL_SHARE = 1 / 3  # of the time, after which the long context is as long as it is
SEED = 0

_Name = TypeVar("_Name")

# Without a profile:
QUICK_WIDTHS = (1, 2, 4, 8)
_QUICK_ROUNDS = 3
_QUICK_CONTEXT = 16  # tokens
_SLOW_PASS_S = 0.25  # of any width, from which on one pass of each has to do


class Stopwatch:
    """Adds up what it has timed, by whatever clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.total_s = 0.0

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that it took."""
        start = self._clock()
        work()
        taken_s = self._clock() - start
        self.total_s += taken_s
        return taken_s


def uncertainty(seconds: Sequence[float]) -> float:
    """Return half of a median's 95 % interval over the median, by its quartiles (McGill, Tukey and
    Larsen 1978, Variations of Box Plots)."""
    lower, middle, upper = np.quantile(seconds, [0.25, 0.5, 0.75])
    return float(1.57 * (upper - lower) / (max(middle, LEAST_S) * len(seconds) ** 0.5))


def median_seconds(passes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return t(k), of the seconds of passes by their rows."""
    return {rows: _typical(seconds) for rows, seconds in passes.items()}


def quick_passes(
    model: Model,
    widths: Sequence[int] = QUICK_WIDTHS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Return the seconds of each pass by its rows, in turns, after a short prompt.

    Takes about as long as 80 plain steps of a model whose rows cost a quarter of a step each, and
    as 15 of a slow one, of which few passes are made.
    """
    limit = min(model.capabilities.max_rows, model.config.context_length // 2)
    widths = [width for width in widths if width <= limit] or [1]

    def is_enough(seconds: Mapping[int, Sequence[float]]) -> bool:
        return max(map(max, seconds.values())) > _SLOW_PASS_S

    return passes_in_turns(
        model, widths, _QUICK_CONTEXT, _QUICK_ROUNDS, Stopwatch(clock), is_enough
    )


def in_turns(
    works: Mapping[_Name, Callable[[], object]],
    rounds: int,
    watch: Stopwatch,
    is_enough: Callable[[Mapping[_Name, Sequence[float]]], bool] = lambda seconds: False,
) -> dict[_Name, list[float]]:
    """Return the seconds of works by their names, in turns, for `rounds` rounds or until it
    `is_enough`. One round more comes first, which binds buffers."""
    seconds: dict[_Name, list[float]] = {name: [] for name in works}
    for done in range(rounds + 1):
        for name, work in works.items():
            taken_s = watch.time(work)
            if done:
                seconds[name].append(taken_s)
        if done and is_enough(seconds):
            break
    return seconds


def passes_in_turns(
    model: Model,
    widths: Sequence[int],
    context: int,
    rounds: int,
    watch: Stopwatch,
    is_enough: Callable[[Mapping[int, Sequence[float]]], bool],
) -> dict[int, list[float]]:
    """Return the seconds of passes by their rows, as `in_turns` does, after a text of at most
    `context` tokens. widths: ascending."""
    room = max(1, model.config.context_length - widths[-1])
    tokens = _tokens(model, context + widths[-1])
    with closing(model.open_session()) as session:
        session.prefill(tokens[: min(context, room)])
        trees = {width: TokenTree.chain(tokens[0], tokens[1:width]) for width in widths}
        passes = {width: partial(session.forward, tree) for width, tree in trees.items()}
        return in_turns(passes, rounds, watch, is_enough)


def _tokens(model: Model, count: int) -> list[int]:
    rng = np.random.default_rng(SEED)
    tokens: list[int] = rng.integers(0, model.config.vocab_size, count).tolist()
    return tokens


def measure(
    model: Model,
    max_s: float,
    on_step: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure until every median is certain to _SPREAD, or the passes took `max_s` and were all
    measured twice. on_step: is given after every pass the share that is done, 0 to 1; what it takes
    does not count. Sessions are the measurement's own, and closed however it ends.

    t(k): from the call of `forward` until its logits are there. Their values decide nothing, so
    random tokens do; those of a mixture of experts touch more experts than most texts, so that its
    wide passes are rather overestimated. prefill_tokens_per_s: of whole passes after the first.
    logits_row_s: to copy one row of them, float32, out of the runtime's memory. commit_s: to keep
    a row and to forget it again, which is all that a round adds outside its pass. What a runtime
    takes to begin a pass cannot be measured apart, and is part of t(1).
    """
    config = model.config
    widest = max(1, min(model.capabilities.max_rows, config.context_length // 2))
    room = max(1, config.context_length - min(widest, WIDTHS[-1]))
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, config.vocab_size, room + WIDTHS[-1]).tolist()
    found = _Measurement(max_s, on_step, Stopwatch(clock), rng, tokens)
    with ExitStack() as opened:
        for wanted in sorted({min(wanted, room) for wanted in _CONTEXTS}):
            found.prefill(opened.enter_context(closing(model.open_session())), wanted)
        found.run(widest)
    contexts = {at: dict[int, float]() for at in sorted(found.sessions)}
    for (at, rows), seconds in found.passes.items():
        contexts[at][rows] = _typical(seconds)
    return Profile(
        contexts=tuple(ContextCosts(*each) for each in contexts.items()),
        prefill_tokens_per_s=1 / _typical(found.prefills[1:] or found.prefills),
        commit_s=median(found.commits),
        logits_row_s=median(found.copies),
        rounds=min(map(len, found.passes.values())),
        spread=found.spread(),
        num_experts=config.num_experts,
        experts_used=config.experts_used,
    )


@dataclass
class _Measurement:
    """The sessions of one that is under way, by their length, and the seconds that it found: of a
    token of each prefill, of passes by context and rows, of commits, and of copies of one row of
    logits."""

    max_s: float
    on_step: Callable[[float], None]
    watch: Stopwatch
    rng: np.random.Generator
    tokens: Sequence[int]
    sessions: dict[int, Session] = field(default_factory=dict)
    prefills: list[float] = field(default_factory=list)
    passes: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    commits: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def prefill(self, session: Session, num_tokens: int) -> None:
        """End early once it has had its share of the time."""
        for start in range(0, num_tokens, _PREFILL_TOKENS):
            if start and self.watch.total_s > _PREFILL_SHARE * self.max_s:
                break
            part = self.tokens[start : min(num_tokens, start + _PREFILL_TOKENS)]
            self.prefills.append(self.watch.time(partial(session.prefill, part)) / len(part))
            self.on_step(min(1.0, self.watch.total_s / self.max_s))
        self.sessions[session.length] = session

    def run(self, widest: int) -> None:
        """Measure passes of up to that many rows. The first round is not counted: it binds
        buffers."""
        step = partial(self.sessions[max(self.sessions)].forward, TokenTree.chain(self.tokens[0]))
        step_s = min(self.watch.time(step) for _ in range(_FIRST_STEPS))
        too_long = step_s * _ROUND_STEPS * USUAL_ROUNDS > self.max_s
        widths = [rows for rows in (_FEW_WIDTHS if too_long else WIDTHS) if rows <= widest]
        order = [(at, rows) for at in self.sessions for rows in widths]
        self.passes = {each: [] for each in order}
        for done in range(_MOST_ROUNDS + 1):
            if done > USUAL_ROUNDS and self.spread() <= _SPREAD:
                return
            for i in self.rng.permutation(len(order)):
                if done > _LEAST_ROUNDS and self.watch.total_s >= self.max_s:
                    return
                at, rows = order[i]
                first = int(self.rng.integers(len(self.tokens) - rows + 1))
                seconds = self._pass(at, self.tokens[first : first + rows])
                if done:
                    self.passes[at, rows].append(seconds[0])
                    self.copies.append(seconds[1])
                    self.commits.append(seconds[2])
                share = max(self.watch.total_s / self.max_s, done / (_MOST_ROUNDS + 1))
                self.on_step(min(1.0, share))

    def spread(self) -> float:
        return max(map(uncertainty, self.passes.values()))

    def _pass(self, at: int, tokens: Sequence[int]) -> tuple[float, float, float]:
        """Return the seconds of a pass, of the copy of a row, and of the commit."""
        session, tree = self.sessions[at], TokenTree.chain(tokens[0], tokens[1:])
        logits = np.empty(0)

        def score() -> None:
            nonlocal logits
            logits = session.forward(tree).logits

        def keep_and_forget() -> None:
            session.commit([0])
            session.rollback(at)

        pass_s = self.watch.time(score)
        copy_s = self.watch.time(lambda: logits.copy())
        return pass_s, copy_s / len(tokens), self.watch.time(keep_and_forget)


def _typical(seconds: Sequence[float]) -> float:
    return max(LEAST_S, median(seconds))


_ROUNDS, _CONTEXT = 16, 32
# Long passes are few, and what else is running changes less of each.
_ENOUGH_S, _LEAST_PAIR_ROUNDS = 1.5, 3
# Of a library's own loop: kernels of attention change from some hundred tokens on.
_OWN_ROUNDS, _OWN_CONTEXT = 32, 320
SLOWER_THAN_OWN = 1.05  # times a step of it, from which on users hear of it
# Of a pair:
_MOST_BESIDE = 64  # passes of the draft during one of the target
_PAIR_ENOUGH_S = 6.0


def relative_cost(model: Model, width: int) -> float:
    """Return the time of a pass of `width` rows over one of a single row: of each the lower
    quartile, in turns, since whatever else is running only makes a pass longer."""
    watch = Stopwatch()

    def is_enough(seconds: Mapping[int, Sequence[float]]) -> bool:
        return len(seconds[1]) >= _LEAST_PAIR_ROUNDS and watch.total_s > _ENOUGH_S

    seconds = passes_in_turns(model, (1, width), _CONTEXT, _ROUNDS, watch, is_enough)
    return _quarter(seconds[width]) / _quarter(seconds[1])


def own_loop_cost(model: Model) -> float | None:
    """Return our plain step over that of the library's own loop, after as many tokens: of each the
    lower quartile, in turns. None where it has none, or a text of that length does not fit."""
    if not isinstance(model, HasOwnLoop):
        return None
    if model.config.context_length < _OWN_CONTEXT + _OWN_ROUNDS + 1:
        return None
    tokens = _tokens(model, _OWN_CONTEXT)
    ours, theirs = iter(tokens), iter(tokens)
    with closing(model.open_session()) as session, closing(model.open_own_loop(tokens)) as loop:
        session.prefill(tokens)

        def step() -> None:
            session.forward(TokenTree.chain(next(ours)))
            session.commit([0])

        works: dict[str, Callable[[], object]] = {
            "ours": step,
            "theirs": lambda: loop.step(next(theirs)),
        }
        seconds = in_turns(works, _OWN_ROUNDS, Stopwatch())
    return _quarter(seconds["ours"]) / _quarter(seconds["theirs"])


def _quarter(seconds: Sequence[float]) -> float:
    return max(LEAST_S, float(np.quantile(seconds, 0.25)))


def probe_pair(target: Model, draft: Model, on_step: Callable[[float], None]) -> PairFindings:
    """Time the passes of a step of each model alone, of both in turns, and at the same time, in
    rounds that follow each other; medians."""
    samples: list[tuple[float, ...]] = []
    watch = Stopwatch()
    with (
        _passes(target, USUAL_DRAFT_TOKENS + 1) as verify,
        _passes(draft, 1) as read,
        ThreadPoolExecutor(1) as pool,
    ):
        chain = partial(_times, read, USUAL_DRAFT_TOKENS)

        def both() -> None:
            chain()
            verify()

        for done in range(_ROUNDS + 1):
            read()  # after the other model's pass
            draft_s = watch.time(chain) / USUAL_DRAFT_TOKENS
            verify()
            target_s = watch.time(verify)
            turns_s = watch.time(both)
            # The draft is busy for as long as the target.
            count = 1 + min(_MOST_BESIDE, int(target_s / max(LEAST_S, draft_s)))
            beside = pool.submit(Stopwatch().time, partial(_times, read, count))
            target_beside_s = watch.time(verify)
            draft_beside_s = beside.result() / count
            if done:  # the first passes bind buffers
                samples.append((target_s, draft_s, turns_s, target_beside_s, draft_beside_s))
            on_step(done / _ROUNDS)
            if done >= _LEAST_PAIR_ROUNDS and watch.total_s > _PAIR_ENOUGH_S:
                break
    medians = map(_typical, zip(*samples, strict=True))
    target_s, draft_s, turns_s, target_beside_s, draft_beside_s = medians
    return PairFindings(
        switch_s=max(0.0, turns_s - target_s - USUAL_DRAFT_TOKENS * draft_s),
        target_slowdown=max(1.0, target_beside_s / target_s),
        draft_slowdown=max(1.0, draft_beside_s / draft_s),
        draft_token_s=draft_s,
    )


def _times(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


@contextmanager
def _passes(model: Model, rows: int) -> Iterator[Callable[[], None]]:
    """Yield a pass of `rows` rows, as a round makes it: its scores are copied, since a device may
    give them when they are read; one row of it is kept, and forgotten again."""
    context = max(1, min(_CONTEXT, model.config.context_length - rows))
    tokens = _tokens(model, context + rows)
    tree = TokenTree.chain(tokens[0], tokens[1:rows])
    with closing(model.open_session()) as session:
        session.prefill(tokens[:context])

        def one_pass() -> None:
            session.forward(tree).logits.copy()
            session.commit([0])
            session.rollback(context)

        yield one_pass
