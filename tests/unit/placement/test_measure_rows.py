"""What rows cost, measured in a moment where no profile is known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.tree import TokenTree
from edge_spec.placement import measure
from edge_spec.placement.measure import QUICK_WIDTHS, measure_rows
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

SECONDS = {1: 1.0, 2: 1.2, 4: 2.0, 8: 2.4}


class Timed(ScriptedModel):
    """Its passes take what `seconds` says; the first of each width takes longer, one hangs."""

    def __init__(self, context_length: int = 512, max_rows: int = 64) -> None:
        super().__init__(random_logits(9), 9, context_length)
        self.capabilities = Capabilities(max_rows, trees=True, rollback=True, hidden_states=False)
        self.now = 0.0
        self.widths: list[int] = []
        self.open = 0

    def clock(self) -> float:
        return self.now

    def open_session(self) -> ScriptedSession:
        self.open += 1
        return TimedSession(self)


class TimedSession(ScriptedSession):
    def __init__(self, model: Timed) -> None:
        super().__init__(model)
        self._timed = model

    def forward(self, tree: TokenTree) -> Forward:
        timed = self._timed
        first = len(tree) not in timed.widths
        timed.widths.append(len(tree))
        timed.now += SECONDS.get(len(tree), 9.0) + 50 * first + 70 * (len(timed.widths) == 6)
        return super().forward(tree)

    def close(self) -> None:
        self._timed.open -= 1


def test_widths_are_measured_in_turn_without_their_first_pass_and_without_outliers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_SLOW_PASS_S", 100.0)  # more than its passes take
    model = Timed()
    costs = measure_rows(model, clock=model.clock)
    for rows, seconds in SECONDS.items():
        assert costs.at(rows) == pytest.approx(seconds)
    assert model.widths == list(QUICK_WIDTHS) * 4 and all(a != b for a, b in pairwise(model.widths))
    assert model.open == 0


@pytest.mark.parametrize(
    ("context", "max_rows", "widths"),
    [(512, 4, {1, 2, 4}), (512, 1, {1}), (8, 64, {1, 2, 4}), (2, 64, {1}), (17, 64, {1, 2, 4, 8})],
)
def test_only_passes_that_the_model_takes_are_measured(
    context: int, max_rows: int, widths: set[int]
) -> None:
    model = Timed(context, max_rows)
    costs = measure_rows(model, clock=model.clock)
    assert set(model.widths) == widths
    assert costs.at(1) == pytest.approx(1.0)
