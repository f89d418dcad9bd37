"""Findings about the rows of a pass, shared by all models of one shape.

They say how rows agree here, what a padded plain step costs and, without a profile, what passes
cost. They depend on the library's build, the processor, the weight format and the shapes, not on
weight values, and are cached under these. Pass times start from usual proportions, are corrected by
every pass and kept for the next session, averaged with earlier answers: the machine may have been
busy. A profile replaces them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
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
_WIDE = 4  # rows; a way that agrees this far ends the search
_SHORT_CONTEXT = 1024  # tokens; a shorter context may skip part of the measurement


ROWS = Quantity("rows", ProfileKey, lambda: TypeAdapter(BatchInvariance))


def rows_key(key: ProfileKey, config: ModelConfig) -> ProfileKey:
    """Return what findings depend on, without what models of one shape differ in."""
    return replace(
        key,
        model="",
        identity="",
        build=runtimes.library_build(key.runtime),
        features=cpu_features(),
        shapes=shapes_of(config),
    )


def holds(key: ProfileKey, asked: RuntimeOptions) -> bool:
    """Return True if a measurement applies to this library, processor and options."""
    return (
        key.cpu == cpu_name()
        and key.library == runtimes.library_version(key.runtime)
        and (key.device, key.threads) == (",".join(asked.providers), asked.threads)
        and key.options == options_apart(asked)
        and key.kernels == runtimes.own_kernels(key.runtime)
        and key.export == EXPORT_VERSION
    )


def find_rows(model: Model, key: ProfileKey, widths: Sequence[int]) -> BatchInvariance:
    """Return cached findings for these widths, else measure and cache them. Kernels that are
    batch-invariant by construction need no measurement."""
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
    """Choose among the model's ways of computing, if it has several.

    Takes the fastest way whose wide passes score a row as a single-row pass does, else the one that
    agrees up to the widest pass. If none agrees, or near ties may differ, takes the fastest. A
    large model takes the likeliest way if it agrees at all: trying another takes seconds.
    """
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
    """Return the widest pass that scores a row as a single-row pass does."""
    return found.invariant_widths[-1] if found.plain_width == 1 else 1


def _plain_cost(model: Model, found: BatchInvariance) -> float:
    """Return the least of a few measurements, stopping once the outcome is decided. Other load
    makes wide passes seem relatively more expensive, and the finding is kept."""
    if found.plain_width == 1 or len(found.invariant_widths) == 1:
        return 1.0
    cost = math.inf
    for _ in range(_ATTEMPTS):
        cost = min(cost, relative_cost(model, found.plain_width))
        if cost <= 1 + MOST_PADDING:
            break
    return max(cost, 1.0)


def shapes_of(config: ModelConfig) -> tuple[int, ...]:
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
    """Return usual proportions, with stored times of some widths. Makes no pass."""
    kernels = key.kernels if model.capabilities.invariant_rows else ""
    return recall_costs(kernels, key.device, SECONDS.known(key) or {})


def recall_costs(kernels: str, device: str, seconds: Mapping[int, float]) -> RowCosts:
    """Return usual proportions, corrected by known times. kernels, device: as for `row_shares`."""
    costs = RowCosts(row_shares(kernels, device), is_measured=False)
    costs.recall(seconds)
    return costs


_SHORT_TEXT = 1024  # tokens; passes after a longer text take longer
_FEWEST = 4  # passes of a width in an answer, to count at all
_SHARE = 1 / 3  # weight of one answer in the stored value: the machine may have been busy
_EVERY_S = 30.0  # at least between two writes, each of which waits for the disk


class RoundTimes:
    """Keep the pass times of all conversations on one model for the next session. Thread-safe."""

    def __init__(
        self,
        key: ProfileKey,
        widths: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """widths: ascending widths that passes are padded to; empty if not padded."""
        self._key = key
        self._widths = widths
        self._current: dict[int, list[float]] = {}  # seconds by rows, of answers in progress
        self._unkept: list[tuple[dict[int, float], float]] = []  # of answers: medians, spread
        self._clock = clock
        self._kept_s = clock()
        self._lock = Lock()

    def observe(self, round_stats: RoundStats) -> None:
        """Count a pass that no other conversation shared or waited for."""
        rows = widened(round_stats.num_rows, self._widths)
        if rows is not None and round_stats.num_sharing == 1 and round_stats.forward_s > 0:
            with self._lock:
                self._current.setdefault(rows, []).append(round_stats.forward_s)

    def end(self, num_tokens: int) -> None:
        """End an answer of `num_tokens` tokens. Its pass times are stored now and then, and by
        `keep`."""
        with self._lock:
            current, self._current = self._current, {}
            told = {rows: each for rows, each in current.items() if len(each) >= _FEWEST}
            if num_tokens > _SHORT_TEXT or not told:
                return
            found = {rows: median(seconds) for rows, seconds in told.items()}
            self._unkept.append((found, max(map(_spread, told.values()))))
            if self._clock() < self._kept_s + _EVERY_S:
                return
        self.keep()

    def keep(self) -> None:
        """Store the pass times of all ended answers."""
        with self._lock:
            ended, self._unkept = self._unkept, []
            self._kept_s = self._clock()
            if not ended:
                return
            kept = SECONDS.read(self._key)
            disturbance = ended[0][1] if kept is None else kept.disturbance
            for _, spread in ended:
                disturbance += _SHARE * (spread - disturbance)

            def mix(kept: dict[int, float] | None) -> dict[int, float]:
                return reduce(_mix, (found for found, _ in ended), kept or ended[0][0])

            SECONDS.update(self._key, mix, disturbance=disturbance)


def _spread(seconds: Sequence[float]) -> float:
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return (three_quarters - quarter) / middle


def _mix(kept: Mapping[int, float], found: Mapping[int, float]) -> dict[int, float]:
    """Return t(k) between stored and found times. Pace is separated from the price of rows, so that
    widths of both stay in proportion."""
    pace = median([found[rows] / kept[rows] for rows in found if rows in kept] or [1.0])
    usual = {**{rows: seconds / pace for rows, seconds in found.items()}, **kept}
    return {
        rows: usual[rows] * (found[rows] / usual[rows] if rows in found else pace) ** _SHARE
        for rows in sorted(usual)
    }
