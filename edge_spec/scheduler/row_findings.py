"""Findings about the rows of a pass: how they agree here, what a plain step of the plain width
costs, and of a model that has no profile yet what passes of some rows cost.

All follow from a library's build, the processor, the form of the weights and a model's shapes, not
from its values: they are kept in the cache under these and shared by all models of one shape.

Policies correct the costs by every pass, and a profile takes their place. Before anything is known,
usual proportions do, and the rounds of the first answers tell what passes take. What is kept
and what many rounds take contradict each other where the machine was busy when it was measured, or
is another one now: then what they take is kept instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from statistics import median
from threading import Lock
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from edge_spec.core.config import ModelConfig
from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import HasWays, Model, RuntimeOptions
from edge_spec.core.modes import LosslessMode
from edge_spec.models import runtimes
from edge_spec.models.source import EXPORT_VERSION
from edge_spec.scheduler.batch_invariance import (
    BY_CONSTRUCTION,
    BatchInvariance,
    agreeing_width,
    is_large,
    measure_batch_invariance,
    measured_widths,
)
from edge_spec.scheduler.cost import RowCosts, Scale, costs_of
from edge_spec.scheduler.lossless import MOST_PADDING, Losslessness, keep_promise
from edge_spec.scheduler.lossless import wider as widened
from edge_spec.scheduler.machine import cpu_features, cpu_name
from edge_spec.scheduler.measure import median_seconds, quick_passes, relative_cost, uncertainty
from edge_spec.scheduler.profile import MOST_SPREAD, ProfileKey, options_apart
from edge_spec.storage.measurements import Quantity

_ATTEMPTS = 3
_WIDE = 4  # rows of a pass, from which on no other way is looked for
_SHORT_CONTEXT = 1024  # tokens: a shorter one may leave out what was to be looked at
# Usual passes over one of a single row, before any was seen: of int4 on onnxruntime and of
# llama.cpp's own kernels they were 1.1 to 1.8, 1.5 to 3.3 and 2.5 to 7.5 with 2, 4 and 8 rows, of
# our kernels for few rows 1.0 to 1.1, 1.1 to 1.3 and 1.2 to 2.2. Dearer ones would never be tried.
_SHARES = {1: 1.0, 2: 1.2, 4: 1.7, 8: 2.8, 16: 5.0}
_OWN_SHARES = {1: 1.0, 2: 1.08, 4: 1.22, 8: 1.7, 16: 3.2}

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rows = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class RowsKey:
    """All that findings depend on. how: the model is run, whichever it is."""

    how: ProfileKey
    build: str  # changes with the files of the runtime's library
    features: tuple[str, ...]  # of the processor, that kernels are chosen by
    shapes: tuple[int, ...]
    way: str = ""  # of computing, where there are several


@dataclass(frozen=True)
class RowFindings:
    """widths: that were looked at. plain_cost: a pass of the plain width over one of a row. way: of
    computing, that was chosen of several."""

    widths: tuple[int, ...]
    batch_invariance: BatchInvariance
    plain_cost: _Seconds
    way: str = ""

    def lossless(self, mode: LosslessMode, replays: bool = True) -> Losslessness:
        """Returns how the promise is kept, as `keep_promise` has it."""
        return keep_promise(mode, self.batch_invariance, lambda: self.plain_cost, replays)


_BY_CONSTRUCTION = RowFindings((), BY_CONSTRUCTION, plain_cost=1.0)


ROWS = Quantity("rows", RowsKey, lambda: TypeAdapter(RowFindings))
# t(k), with one row or more.
SECONDS = Quantity(
    "row seconds",
    RowsKey,
    lambda: TypeAdapter(
        Annotated[dict[Annotated[int, Field(ge=1)], _Seconds], Field(min_length=1)]
    ),
)


def rows_key(key: ProfileKey, config: ModelConfig) -> RowsKey:
    """Returns what findings about a model depend on that is opened in this way."""
    how = replace(key, model="", identity="")
    return RowsKey(how, runtimes.library_build(key.runtime), cpu_features(), shapes_of(config))


def holds(key: ProfileKey, asked: RuntimeOptions) -> bool:
    """Says whether what was measured was so with this library and processor, and as asked for."""
    return (
        key.cpu == cpu_name()
        and key.library == runtimes.library_version(key.runtime)
        and (key.device, key.threads) == (",".join(asked.providers), asked.threads)
        and key.options == options_apart(asked)
        and key.kernels == runtimes.own_kernels(key.runtime)
        and key.export == EXPORT_VERSION
    )


def find_rows(model: Model, key: RowsKey, widths: Sequence[int]) -> RowFindings:
    """Returns what the cache knows of these widths; else measures it now, and keeps it. Nothing is
    measured of kernels that compute a row alike by construction."""
    known = ROWS.known(key)
    if model.capabilities.invariant_rows:
        if known != _BY_CONSTRUCTION:
            ROWS.keep(key, _BY_CONSTRUCTION)
        return _BY_CONSTRUCTION
    wanted = measured_widths(model, widths)
    if known is not None and set(wanted) <= set(known.widths):
        return known
    found = measure_batch_invariance(model, wanted)
    findings = RowFindings(tuple(wanted), found, _plain_cost(model, found))
    ROWS.keep(key, findings)
    return findings


def settle_rows(
    model: Model, key: RowsKey, widths: Sequence[int], mode: LosslessMode
) -> RowFindings:
    """Chooses how the model computes, where there are several ways: the fastest of those that score
    a row alike at all widths, and where there is none, or near ties may differ, the fastest."""
    if not isinstance(model, HasWays) or len(model.ways) < 2:
        return find_rows(model, key, widths)
    if mode is LosslessMode.TIES:
        model.choose_way(model.ways[0])
        return find_rows(model, replace(key, way=model.way), widths)
    known = ROWS.known(key)
    if known is not None and known.way in model.ways:
        model.choose_way(known.way)
    else:
        _choose_first_alike(model, key, widths)
    found = find_rows(model, replace(key, way=model.way), widths)
    found = replace(found, way=model.way)
    if found != known:
        ROWS.keep(key, found)
    return found


def _plain_cost(model: Model, found: BatchInvariance) -> float:
    """Returns the least of a few measurements, of which no more are made than decide: what else is
    running makes wide passes dearer than narrow ones, and what is found now is kept."""
    if found.plain_width == 1 or len(found.invariant_widths) == 1:
        return 1.0
    cost = math.inf
    for _ in range(_ATTEMPTS):
        cost = min(cost, relative_cost(model, found.plain_width))
        if cost <= 1 + MOST_PADDING:
            break
    return max(cost, 1.0)


def _choose_first_alike(model: Model, key: RowsKey, widths: Sequence[int]) -> None:
    """Chooses the way that scores single rows as the widest passes do, the first of equal ones. A
    large model takes the one that is likeliest to, if it does: to look at another takes seconds."""
    assert isinstance(model, HasWays)
    if is_large(model.config):
        model.choose_way(model.likeliest_way)
        found = find_rows(model, replace(key, way=model.way), widths).batch_invariance
        if found.plain_width == 1 and len(found.invariant_widths) > 1:
            return
    agreeing: dict[str, int] = {}
    for way in model.ways:
        model.choose_way(way)
        agreeing[way] = agreeing_width(model)
        if agreeing[way] >= _WIDE:
            return
    model.choose_way(max(agreeing, key=agreeing.__getitem__))


def shapes_of(config: ModelConfig) -> tuple[int, ...]:
    """Returns what models of one shape have in common."""
    return (
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.num_experts,
        config.experts_used,
        min(config.context_length, _SHORT_CONTEXT),
    )


def row_costs(
    model: Model, key: RowsKey, clock: Callable[[], float] = time.perf_counter
) -> RowCosts:
    """Returns what the cache knows of such a model; else measures it now, and keeps it."""
    seconds: Mapping[int, float] | None = SECONDS.known(key)
    if seconds is None:
        passes = quick_passes(model, clock=clock)
        seconds = median_seconds(passes)
        spread = max(map(uncertainty, passes.values()))
        if spread <= MOST_SPREAD:
            SECONDS.keep(key, dict(seconds), min(map(len, passes.values())), spread)
    return costs_of(model.config, seconds)


def begun_costs(model: Model, key: RowsKey) -> RowCosts:
    """Returns what the cache knows of such a model; else proportions that are usual, which its
    first passes make seconds of. No pass is made for it."""
    seconds = SECONDS.known(key)
    if seconds is not None:
        return costs_of(model.config, seconds)
    return costs_of(
        model.config, usual_shares(model.capabilities.invariant_rows), Scale(is_known=False)
    )


def usual_shares(has_own_kernels: bool) -> Mapping[int, float]:
    """Return what passes of some rows usually take over one of a single row. has_own_kernels: ours
    compute, whose rows are invariant by construction."""
    return _OWN_SHARES if has_own_kernels else _SHARES


_SHORT_TEXT = 1024  # tokens: passes after a longer one take longer, which says nothing of these
_FIRST = 16  # passes in all, before anything is kept where nothing is known
_FEWEST = 4  # passes of a width, before they tell anything
# A pass that is found faster than what is kept was so; a slower one may have had to wait for
# something else, so that it takes more of them, and what most of them took at least.
_FASTER, _SLOWER = 0.75, 1.5  # times what is kept
_FASTER_PASSES, _SLOWER_PASSES = 32, 256  # of a width
_MOST = 512  # passes of a width that are remembered


class RoundTimes:
    """Counts passes of all conversations on one model. Any thread may call."""

    def __init__(
        self, key: RowsKey, shares: Mapping[int, float], widths: tuple[int, ...] = ()
    ) -> None:
        """shares: what passes of some rows usually take over one of a single row. widths: that
        passes are widened to, ascending; none where they are not."""
        self._key = key
        self._shares = shares
        self._widths = widths
        self._kept: Mapping[int, float] | None = None  # before it was read
        self._passes: dict[int, list[float]] = {}  # seconds by rows, of answers that have ended
        self._current: dict[int, list[float]] = {}  # of those that are being written
        self._lock = Lock()

    def observe(self, round_stats: RoundStats) -> None:
        """Counts the pass of a round that no other conversation had a part in or was waiting
        for."""
        rows = widened(round_stats.num_rows, self._widths)
        if rows is not None and round_stats.num_sharing == 1 and round_stats.forward_s > 0:
            with self._lock:
                self._current.setdefault(rows, []).append(round_stats.forward_s)

    def end(self, num_tokens: int) -> None:
        """Counts an answer as ended, with this many tokens of text, and keeps what is new."""
        with self._lock:
            current, self._current = self._current, {}
            if num_tokens > _SHORT_TEXT:
                return
            for rows, seconds in current.items():
                self._passes[rows] = [*self._passes.get(rows, []), *seconds][-_MOST:]
            found = self._found()
            if found and self._known() == self._kept:  # else by another process
                SECONDS.keep(self._key, found, sum(map(len, self._passes.values())))
                self._passes.clear()
            if found:
                self._kept = None

    def _found(self) -> dict[int, float]:
        """Returns t(k) if there is something new to keep."""
        if self._kept is None:
            self._kept = self._known()
        return self._contradicted() if self._kept else self._first()

    def _known(self) -> Mapping[int, float]:
        return SECONDS.known(self._key) or {}

    def _first(self) -> dict[int, float]:
        """Returns t(k) where enough was seen, on a machine that was free enough."""
        if sum(map(len, self._passes.values())) < _FIRST:
            return {}
        observed = {
            rows: median(seconds)
            for rows, seconds in self._passes.items()
            if len(seconds) >= _FEWEST and uncertainty(seconds) <= MOST_SPREAD
        }
        return rising(observed, in_proportion(self._shares, observed))

    def _contradicted(self) -> dict[int, float]:
        """Returns t(k) in place of what is kept, where passes of a width contradict that."""
        assert self._kept is not None
        observed, is_contradicted = {}, False
        for rows, seconds in self._passes.items():
            if rows not in self._kept or len(seconds) < _FEWEST:
                continue
            observed[rows] = median(seconds)
            faster = observed[rows] < _FASTER * self._kept[rows]
            least_s = float(np.quantile(seconds, 0.25))
            slower = least_s > _SLOWER * self._kept[rows]
            is_contradicted |= faster and len(seconds) >= _FASTER_PASSES
            is_contradicted |= slower and len(seconds) >= _SLOWER_PASSES
        if not is_contradicted:
            return {}
        # What all widths have in common is the machine; what one has beside it is its own.
        changes = [seconds / self._kept[rows] for rows, seconds in observed.items()]
        least = min(changes, key=lambda change: abs(log(change)))
        return rising(observed, {rows: least * each for rows, each in self._kept.items()})


def in_proportion(shares: Mapping[int, float], observed: Mapping[int, float]) -> dict[int, float]:
    """Returns t(k) at the widths of `shares`, each from the nearest one that was observed."""
    if not observed:
        return {}
    known = sorted(shares)
    usual = np.interp(sorted(observed), known, [shares[rows] for rows in known])
    units = {
        rows: observed[rows] / share for rows, share in zip(sorted(observed), usual, strict=True)
    }
    nearest = {rows: min(units, key=lambda each: (abs(each - rows), each)) for rows in known}
    return {rows: float(shares[rows] * units[nearest[rows]]) for rows in known}


def rising(observed: Mapping[int, float], estimates: Mapping[int, float]) -> dict[int, float]:
    """Returns t(k): what was observed, and estimates at other widths.

    No pass takes longer than one of more rows. What else the machine does makes some look as if
    they did, and none look faster than it is: so the time of the wider one holds.
    """
    found: dict[int, float] = {}
    least_s = inf
    for rows in sorted(observed, reverse=True):
        found[rows] = least_s = min(least_s, observed[rows])
    at_least_s = 0.0
    for rows in sorted({*observed, *estimates}):
        most_s = min((found[each] for each in observed if each >= rows), default=inf)
        at_least_s = max(at_least_s, found.get(rows, min(most_s, estimates.get(rows, 0.0))))
        found[rows] = at_least_s
    return dict(sorted(found.items()))
