"""Findings about the rows of a pass: how they agree here, what a plain step of the plain width
costs, and of a model that has no profile yet what passes of some rows cost.

All follow from a library's build, the processor, the form of the weights and a model's shapes, not
from its values: they are kept in the cache under these and shared by all models of one shape.

Policies correct the costs by every pass, and a profile takes their place. Before anything is known,
usual proportions do. What the passes of an answer took is kept for the next session, averaged with
what those of earlier answers took: the machine may have been busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from threading import Lock

from pydantic import TypeAdapter

from edge_spec.core.config import ModelConfig
from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import HasWays, Model, RuntimeOptions
from edge_spec.core.modes import LosslessMode
from edge_spec.models import runtimes
from edge_spec.models.source import EXPORT_VERSION
from edge_spec.scheduler.batch_invariance import (
    BY_CONSTRUCTION,
    BatchInvariance,
    is_large,
    measure_batch_invariance,
    measured_widths,
)
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.lossless import MOST_PADDING
from edge_spec.scheduler.lossless import wider as widened
from edge_spec.scheduler.machine import cpu_features, cpu_name
from edge_spec.scheduler.measure import relative_cost
from edge_spec.scheduler.priors import row_shares
from edge_spec.scheduler.profile import SECONDS, ProfileKey, options_apart
from edge_spec.storage.measurements import Quantity

_ATTEMPTS = 3
_WIDE = 4  # rows of a pass, from which on no other way is looked for
_SHORT_CONTEXT = 1024  # tokens: a shorter one may leave out what was to be looked at


ROWS = Quantity("rows", ProfileKey, lambda: TypeAdapter(BatchInvariance))


def rows_key(key: ProfileKey, config: ModelConfig) -> ProfileKey:
    """Return what findings depend on that all models of one shape share, opened in this way."""
    return replace(
        key,
        model="",
        identity="",
        build=runtimes.library_build(key.runtime),
        features=cpu_features(),
        shapes=shapes_of(config),
    )


def holds(key: ProfileKey, asked: RuntimeOptions) -> bool:
    """Return whether what was measured was so with this library and processor, and as asked for."""
    return (
        key.cpu == cpu_name()
        and key.library == runtimes.library_version(key.runtime)
        and (key.device, key.threads) == (",".join(asked.providers), asked.threads)
        and key.options == options_apart(asked)
        and key.kernels == runtimes.own_kernels(key.runtime)
        and key.export == EXPORT_VERSION
    )


def find_rows(model: Model, key: ProfileKey, widths: Sequence[int]) -> BatchInvariance:
    """Return what the cache knows of these widths; else measures it now, and keeps it. Nothing is
    measured of kernels that compute a row alike by construction."""
    known = ROWS.known(key)
    if model.capabilities.invariant_rows:
        if known != BY_CONSTRUCTION:
            ROWS.keep(key, BY_CONSTRUCTION)
        return BY_CONSTRUCTION
    wanted = measured_widths(model, widths)
    if known is not None and set(wanted) <= set(known.widths):
        return known
    found = measure_batch_invariance(model, wanted)
    found = replace(found, plain_cost=_plain_cost(model, found))
    ROWS.keep(key, found)
    return found


def settle_rows(
    model: Model, key: ProfileKey, widths: Sequence[int], mode: LosslessMode
) -> BatchInvariance:
    """Choose how the model computes, where there are several ways: the fastest one whose wide
    passes score a row as a pass of one row does, else the one that does so up to the widest passes.
    Where none does, or near ties may differ, the fastest. A large model takes the likeliest one if
    it does so at all: to look at another takes seconds."""
    if not isinstance(model, HasWays) or len(model.ways) < 2:
        return find_rows(model, key, widths)
    ways, known = list(model.ways), ROWS.known(key)
    enough = dict.fromkeys(ways, _WIDE)
    if mode is LosslessMode.TIES:
        ways = ways[:1]
    elif known is not None and known.way in ways:
        ways = [known.way]
    elif is_large(model.config):
        ways.sort(key=lambda way: way != model.likeliest_way)
        enough[model.likeliest_way] = 2
    found: dict[str, BatchInvariance] = {}
    for way in ways:
        model.choose_way(way)
        found[way] = replace(find_rows(model, replace(key, way=way), widths), way=way)
        if _agreeing_width(found[way]) >= enough[way]:
            break
    fastest_first = [way for way in model.ways if way in found]
    best = max(fastest_first, key=lambda way: _agreeing_width(found[way]))
    model.choose_way(best)
    if mode is not LosslessMode.TIES and found[best] != known:
        ROWS.keep(key, found[best])
    return found[best]


def _agreeing_width(found: BatchInvariance) -> int:
    """Return the widest pass that scores a row as a pass of one row does."""
    return found.invariant_widths[-1] if found.plain_width == 1 else 1


def _plain_cost(model: Model, found: BatchInvariance) -> float:
    """Return the least of a few measurements, of which no more are made than decide: what else is
    running makes wide passes dearer than narrow ones, and what is found now is kept."""
    if found.plain_width == 1 or len(found.invariant_widths) == 1:
        return 1.0
    cost = math.inf
    for _ in range(_ATTEMPTS):
        cost = min(cost, relative_cost(model, found.plain_width))
        if cost <= 1 + MOST_PADDING:
            break
    return max(cost, 1.0)


def shapes_of(config: ModelConfig) -> tuple[int, ...]:
    """Return what models of one shape have in common."""
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


def begun_costs(model: Model, key: ProfileKey) -> RowCosts:
    """Return costs in usual proportions, with what the store knows of some widths. No pass is made
    for it."""
    kernels = key.kernels if model.capabilities.invariant_rows else ""
    return recall_costs(kernels, key.device, SECONDS.known(key) or {})


def recall_costs(kernels: str, device: str, seconds: Mapping[int, float]) -> RowCosts:
    """Return costs in usual proportions, with what was found of some widths. kernels, device: as
    for `row_shares`."""
    costs = RowCosts(row_shares(kernels, device), is_measured=False)
    costs.recall(seconds)
    return costs


_SHORT_TEXT = 1024  # tokens: passes after a longer one take longer, which says nothing of these
_FEWEST = 4  # passes of a width in an answer, before they tell anything
_SHARE = 1 / 3  # of an answer, in what is kept: the machine may have been busy


class RoundTimes:
    """Keeps what passes of all conversations on one model took, for the next session to begin with.
    Any thread may call."""

    def __init__(self, key: ProfileKey, widths: tuple[int, ...] = ()) -> None:
        """widths: that passes are widened to, ascending; none where they are not."""
        self._key = key
        self._widths = widths
        self._current: dict[int, list[float]] = {}  # seconds by rows, of answers being written
        self._lock = Lock()

    def observe(self, round_stats: RoundStats) -> None:
        """Count the pass of a round that no other conversation had a part in or was waiting
        for."""
        rows = widened(round_stats.num_rows, self._widths)
        if rows is not None and round_stats.num_sharing == 1 and round_stats.forward_s > 0:
            with self._lock:
                self._current.setdefault(rows, []).append(round_stats.forward_s)

    def end(self, num_tokens: int) -> None:
        """Count an answer as ended, with this many tokens of text, and keep what it found."""
        with self._lock:
            current, self._current = self._current, {}
            told = {rows: each for rows, each in current.items() if len(each) >= _FEWEST}
            if num_tokens > _SHORT_TEXT or not told:
                return
            found = {rows: median(seconds) for rows, seconds in told.items()}
            disturbance, kept = max(map(_spread, told.values())), SECONDS.read(self._key)
            if kept is not None:
                disturbance = kept.disturbance + _SHARE * (disturbance - kept.disturbance)
            SECONDS.update(
                self._key, lambda kept: _mix(kept or found, found), disturbance=disturbance
            )


def _spread(seconds: Sequence[float]) -> float:
    """Return how far the middle half of them lies apart, over their median."""
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return (three_quarters - quarter) / middle


def _mix(kept: Mapping[int, float], found: Mapping[int, float]) -> dict[int, float]:
    """Return t(k) between what was kept and what was found. How fast the machine was is told apart
    from what its rows cost, so that widths of both stay in proportion."""
    pace = median([found[rows] / kept[rows] for rows in found if rows in kept] or [1.0])
    usual = {**{rows: seconds / pace for rows, seconds in found.items()}, **kept}
    return {
        rows: usual[rows] * (found[rows] / usual[rows] if rows in found else pace) ** _SHARE
        for rows in sorted(usual)
    }
