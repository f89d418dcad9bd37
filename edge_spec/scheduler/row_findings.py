"""Findings about the rows of a pass: how they agree here, what a plain step of the plain width
costs, and of a model that has no profile yet what passes of some rows cost.

All follow from a library's build, the processor, the form of the weights and a model's shapes, not
from its values: they are kept in the cache under these and shared by all models of one shape.

Policies correct the costs by every pass, and a profile takes their place. Before anything is known,
usual proportions do. What the passes of an answer took is kept for the next session, as a mean that
passes on a busy machine hardly change.
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
    agreeing_width,
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
    """Choose how the model computes, where there are several ways: the fastest of those that score
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


def _choose_first_alike(model: Model, key: ProfileKey, widths: Sequence[int]) -> None:
    """Choose the way that scores single rows as the widest passes do, the first of equal ones. A
    large model takes the one that is likeliest to, if it does: to look at another takes seconds."""
    assert isinstance(model, HasWays)
    if is_large(model.config):
        model.choose_way(model.likeliest_way)
        found = find_rows(model, replace(key, way=model.way), widths)
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
_USUAL_SPREAD = 0.1  # of passes of a width, over their median: twice that counts for a fifth
_MOST_KEPT = 64.0  # passes of a width that earlier answers count for


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
            count = sum(map(len, told.values()))
            disturbance = max(map(_spread, told.values()))
            weight, kept = _trust(count, disturbance), SECONDS.read(self._key)
            if kept is not None:
                before = _trust(kept.n, kept.disturbance)
                share = weight / (before + weight)
                found = _mix(kept.value, found, share)
                count = count + kept.n
                disturbance += (1 - share) * (kept.disturbance - disturbance)
            SECONDS.keep(self._key, found, count, disturbance)


def _spread(seconds: Sequence[float]) -> float:
    """Return how far the middle half of them lies apart, over their median."""
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return (three_quarters - quarter) / middle


def _trust(count: int, disturbance: float) -> float:
    """Return the passes that these count for: few where the machine was busy."""
    return min(count, _MOST_KEPT) / (1 + (disturbance / _USUAL_SPREAD) ** 2)


def _mix(kept: Mapping[int, float], found: Mapping[int, float], share: float) -> dict[int, float]:
    """Return t(k) between what was kept and what was found, whose share this is. How fast the
    machine was is told apart from what its rows cost, so that widths of both stay in proportion."""
    common = [found[rows] / kept[rows] for rows in found if rows in kept]
    slower = median(common) if common else 1.0
    mixed = dict(kept)
    for rows, seconds in found.items():
        before_s = kept.get(rows, seconds / slower)
        mixed[rows] = before_s + share * (seconds / slower - before_s)
    pace = 1 + share * (slower - 1)
    return {rows: pace * seconds for rows, seconds in sorted(mixed.items())}
