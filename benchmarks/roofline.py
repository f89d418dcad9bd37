"""Computes what passes take on machines that nobody here has, by the figures of their makers.

A pass takes a fixed time for the call, and then the longer of reading the weights once and
computing its rows (Williams et al. 2009, Roofline). Units that share a memory slow each other down
while both run, where they ask for more than it gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_spec.placement.profile import TYPICAL_TOKENS, ContextCosts, PairFindings, Profile

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)


@dataclass(frozen=True)
class RooflineModel:
    """gb: of weights that a pass reads, in 1e9 bytes; gop_row: 1e9 operations of a row, two for
    each weight; row_ms: to bring a row of scores to main memory and to choose of it."""

    gb: float
    gop_row: float
    row_ms: float


@dataclass(frozen=True)
class Unit:
    """A device. gb_s: 1e9 bytes a second that it reads alone; tops: 1e12 operations a second, as
    sustained; call_ms: to begin a pass and to learn that it has ended; widths: rows of the passes
    that are compiled, to which others are padded, or none where any width runs."""

    gb_s: float
    tops: float
    call_ms: float
    widths: tuple[int, ...] = ()

    def pass_s(self, model: RooflineModel, rows: int) -> float:
        padded = next((width for width in self.widths if width >= rows), rows)
        computing_s = padded * model.gop_row / (1e3 * self.tops)
        return self.call_ms / 1e3 + max(model.gb / self.gb_s, computing_s)


@dataclass(frozen=True)
class SimulatedMachine:
    """memory_gb_s: what its units get together, None where each has a memory of its own;
    switch_ms: of a round, for two units to take turns."""

    units: Mapping[str, Unit]
    memory_gb_s: float | None
    switch_ms: float

    def profile(self, unit: str, model: RooflineModel) -> Profile:
        seconds = {rows: self.units[unit].pass_s(model, rows) for rows in _WIDTHS}
        costs = (ContextCosts(TYPICAL_TOKENS, seconds),)
        return Profile(costs, 1 / seconds[1], 0.0, model.row_ms / 1e3, 6, 0.0)

    def findings(
        self, target: tuple[str, RooflineModel], draft: tuple[str, RooflineModel]
    ) -> PairFindings | None:
        """Returns what the probe of a pair would find; None on one unit, whose models take turns
        and are not measured together."""
        if target[0] == draft[0]:
            return None
        slowdown = 1.0
        if self.memory_gb_s is not None:
            asked = sum(self._asked_gb_s(unit, model) for unit, model in (target, draft))
            slowdown = max(1.0, asked / self.memory_gb_s)
        one, four = (
            self.units[draft[0]].pass_s(draft[1], rows) + rows * draft[1].row_ms / 1e3
            for rows in (1, 4)
        )
        row_s = (four - one) / 3
        return PairFindings(self.switch_ms / 1e3, slowdown, slowdown, one - row_s, row_s)

    def _asked_gb_s(self, unit: str, model: RooflineModel) -> float:
        return model.gb / self.units[unit].pass_s(model, 1)
