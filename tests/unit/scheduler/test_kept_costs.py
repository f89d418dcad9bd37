"""Costs of rows before there is a profile: measured once for a shape, seldom for a slow model."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.measure import QUICK_WIDTHS
from edge_spec.scheduler.profile import ProfileKey
from edge_spec.scheduler.row_findings import row_costs
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

HOW = ProfileKey("", "", "int4", "ort", "1.32", "", 2, (), "a processor")
KEY = replace(HOW, build="abc", features=("X86_V3",), shapes=(1, 2, 3))
SECONDS = {1: 0.010, 2: 0.012, 4: 0.016, 8: 0.024}


class Clocked(ScriptedModel):
    """Its passes take SECONDS, times what comes next of `factors`."""

    def __init__(self, *factors: float) -> None:
        super().__init__(random_logits(9), 9, 512)
        self.factors = cycle(factors)
        self.now = 0.0
        self.num_passes = 0

    def clock(self) -> float:
        return self.now

    def open_session(self) -> ScriptedSession:
        return ClockedSession(self)


class ClockedSession(ScriptedSession):
    def __init__(self, model: Clocked) -> None:
        super().__init__(model)
        self._clocked = model

    def forward(self, tree: TokenTree) -> Forward:
        self._clocked.num_passes += 1
        self._clocked.now += SECONDS[len(tree)] * next(self._clocked.factors)
        return super().forward(tree)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))


def costs_of(model: Clocked, key: ProfileKey = KEY) -> dict[int, float]:
    costs = row_costs(model, key, model.clock)
    return {rows: costs.at(rows) for rows in QUICK_WIDTHS}


def test_a_second_start_measures_nothing_and_another_shape_does() -> None:
    first, second = Clocked(1.0), Clocked(1.0)
    assert costs_of(first) == pytest.approx(SECONDS)
    assert costs_of(second) == pytest.approx(SECONDS)
    assert first.num_passes == 16 and second.num_passes == 0
    costs_of(second, replace(KEY, shapes=(4, 5, 6)))
    assert second.num_passes == 16


def test_what_a_busy_machine_takes_is_not_kept() -> None:
    first, second = Clocked(1.0, 9.0, 1.0, 2.0, 7.0), Clocked(1.0)
    costs_of(first)
    costs_of(second)
    assert second.num_passes == 16
