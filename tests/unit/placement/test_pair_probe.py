"""What a pair is found to cost, on models whose passes advance a clock of their own."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.placement.comparison import probe_pair
from edge_spec.testing import ScriptedModel, ScriptedSession


class World:
    """Time in which a pass after one of the other model takes more. Both models' passes advance it,
    so that one that runs beside another finds both in its time."""

    def __init__(self, switch_s: float) -> None:
        self.now_s = 0.0
        self._switch_s = switch_s
        self._last: object = None
        self._lock = Lock()

    def spend(self, who: object, seconds: float) -> None:
        with self._lock:
            self.now_s += seconds + (self._switch_s if self._last is not who else 0.0)
            self._last = who


class TimedModel(ScriptedModel):
    def __init__(self, world: World, row_s: float, call_s: float = 0.0) -> None:
        super().__init__(lambda tokens: np.zeros(8, np.float32), 8)
        self.world, self.row_s, self.call_s = world, row_s, call_s

    def open_session(self) -> Any:
        return TimedSession(self)


class TimedSession(ScriptedSession):
    def __init__(self, model: TimedModel) -> None:
        super().__init__(model)
        self._timed = model

    def forward(self, tree: TokenTree) -> Forward:
        model = self._timed
        model.world.spend(model, model.call_s + len(tree) * model.row_s)
        return super().forward(tree)


@pytest.mark.parametrize("switch_s", [0.0, 0.25])
def test_taking_turns_costs_what_passes_of_each_alone_do_not(switch_s: float) -> None:
    world = World(switch_s)
    target, draft = TimedModel(world, 1.0), TimedModel(world, 0.5)
    told: list[float] = []
    found = probe_pair(target, draft, told.append, lambda: world.now_s)
    # Alone, a model's passes follow one another; a round goes to the draft and back.
    assert found.switch_s == pytest.approx(2 * switch_s)
    # The draft's passes beside one of the target fall into its time, all or none of them.
    assert found.target_slowdown >= 1.0 and found.draft_slowdown >= 1.0
    assert told[0] == 0.0 and told[-1] <= 1.0


@pytest.mark.parametrize(("max_rows", "row_s"), [(64, 0.5), (1, 0.0)])
def test_the_call_of_a_drafts_device_is_told_from_its_rows(max_rows: int, row_s: float) -> None:
    world = World(0.25)
    target, draft = TimedModel(world, 1.0), TimedModel(world, 0.5, call_s=3.0)
    draft.capabilities = replace(draft.capabilities, max_rows=max_rows)
    found = probe_pair(target, draft, lambda fraction: None, lambda: world.now_s)
    assert found.draft_token_s == pytest.approx(3.5)
    assert (found.row_s, found.call_s) == (pytest.approx(row_s), pytest.approx(3.5 - row_s))


def test_sessions_are_closed_where_a_pass_fails() -> None:
    class Failing(TimedSession):
        closed = 0

        def forward(self, tree: TokenTree) -> Forward:
            raise RuntimeError("lost")

        def close(self) -> None:
            Failing.closed += 1

    world = World(0.0)
    target, draft = TimedModel(world, 1.0), TimedModel(world, 1.0)
    target.open_session = lambda: Failing(target)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        probe_pair(target, draft, lambda fraction: None)
    assert Failing.closed == 1
