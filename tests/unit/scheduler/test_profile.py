"""Profiles: how they are measured on a disturbed machine, kept, and made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.measure import (
    CONTEXT,
    QUICK_WIDTHS,
    USUAL_ROUNDS,
    WIDTHS,
    measure,
    quick_passes,
)
from edge_spec.scheduler.profile import (
    SECONDS,
    Profile,
    ProfileKey,
    load_learnt,
    load_profile,
    save_learnt,
    save_profile,
)
from edge_spec.testing import ScriptedModel, ScriptedSession

KEY = ProfileKey("m", "abc", "Q4_0", "ort", "1.0", "cpu", None, (), "a processor")
PROFILE = Profile({1: 1.0, 4: 2.0}, rounds=6, spread=0.01)
STEP_S, PREFILL_S, OPEN_ROWS = 0.010, 0.001, 0.002


class TimedModel(ScriptedModel):
    """Its passes take STEP_S and OPEN_ROWS a row more, each token of context 10 microseconds, times
    what `disturbed` says of the number of passes so far."""

    def __init__(
        self,
        disturbed: Callable[[int], float] = lambda num_passes: 1.0,
        context_length: int = 4096,
        max_rows: int = 64,
    ) -> None:
        zeros = np.zeros(8, np.float32)
        super().__init__(lambda tokens: zeros, 8, context_length)
        self.capabilities = Capabilities(max_rows, True, True, False)
        self.disturbed = disturbed
        self.now_s = 0.0
        self.num_passes = 0
        self.prefilled: list[int] = []
        self.opened: list[TimedSession] = []

    def clock(self) -> float:
        return self.now_s

    def open_session(self) -> ScriptedSession:
        session = TimedSession(self)
        self.opened.append(session)
        return session


class TimedSession(ScriptedSession):
    def __init__(self, model: TimedModel) -> None:
        super().__init__(model)
        self._timed = model
        self.is_closed = False

    def prefill(self, tokens: Sequence[int]) -> None:
        self._timed.prefilled.append(len(tokens))
        self._timed.now_s += PREFILL_S * len(tokens)
        super().prefill(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        model = self._timed
        seconds = STEP_S + OPEN_ROWS * (len(tree) - 1) + 1e-5 * self.length
        model.num_passes += 1
        model.now_s += seconds * model.disturbed(model.num_passes)
        return super().forward(tree)

    def close(self) -> None:
        self.is_closed = True
        super().close()


def measured(model: TimedModel, max_s: float = 20.0) -> Profile:
    return measure(model, max_s, lambda fraction: None, model.clock)


def expected(rows: int, context: int) -> float:
    return STEP_S + OPEN_ROWS * (rows - 1) + 1e-5 * context


def test_on_a_quiet_machine_every_width_is_measured_exactly() -> None:
    model = TimedModel()
    profile = measured(model)
    assert tuple(profile.seconds) == WIDTHS
    for rows, seconds in profile.seconds.items():
        assert seconds == pytest.approx(expected(rows, CONTEXT))
    assert profile.spread < 1e-6 and profile.rounds == USUAL_ROUNDS  # stable at once
    assert all(session.is_closed for session in model.opened)


@pytest.mark.parametrize(("slower", "least", "rounds"), [(1.0, 1, 3), (20.0, 1, 1), (20.0, 2, 2)])
def test_quick_passes_are_few_of_a_slow_model(slower: float, least: int, rounds: int) -> None:
    """After a round that is not counted."""
    model = TimedModel(lambda n: slower)
    passes = quick_passes(model, clock=model.clock, least=least)
    assert tuple(passes) == QUICK_WIDTHS
    assert model.num_passes == len(QUICK_WIDTHS) * (rounds + 1)
    for rows, seconds in passes.items():
        assert seconds == pytest.approx([slower * expected(rows, 16)] * rounds)


def test_passes_that_something_disturbed_do_not_count() -> None:
    rng = np.random.default_rng(1)
    slow = rng.random(100_000) < 0.15
    profile = measured(TimedModel(lambda n: 8.0 if slow[n] else 1.0))
    for rows, seconds in profile.seconds.items():
        assert seconds == pytest.approx(expected(rows, CONTEXT))


def test_the_time_is_bounded_but_for_two_rounds() -> None:
    noise = np.random.default_rng(2).lognormal(0.0, 1.0, 100_000)
    model = TimedModel(lambda n: noise[n])
    assert measured(model, max_s=6.0).rounds > 2
    assert model.now_s < 7.0
    assert measured(TimedModel(lambda n: 100 * noise[n]), max_s=4.0).rounds == 2


def test_a_profile_of_a_busy_machine_is_not_used_again() -> None:
    busy = np.random.default_rng(3).random(100_000) < 0.4
    profile = measured(TimedModel(lambda n: 200.0 if busy[n] else 1.0), max_s=4.0)
    assert not profile.is_certain
    save_profile(KEY, profile)
    assert load_profile(KEY) is None
    save_profile(KEY, PROFILE)
    save_profile(KEY, profile)  # which says less
    assert PROFILE.is_certain and load_profile(KEY) == PROFILE


@pytest.mark.parametrize(
    ("context_length", "max_rows", "widest"), [(8, 64, 4), (2, 64, 1), (64, 3, 3), (512, 64, 32)]
)
def test_what_does_not_fit_is_not_measured(context_length: int, max_rows: int, widest: int) -> None:
    model = TimedModel(context_length=context_length, max_rows=max_rows)
    assert max(measured(model).seconds) == widest
    assert max(model.prefilled) + widest <= context_length


def test_an_ended_measurement_closes_its_sessions() -> None:
    model = TimedModel()
    steps = iter(range(3))
    with pytest.raises(StopIteration):
        measure(model, 20.0, lambda share: next(steps), model.clock)
    assert model.opened and all(session.is_closed for session in model.opened)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))


@pytest.mark.parametrize("change", [{"library": "2.0"}, {"export": 1}])
def test_a_profile_of_another_library_or_conversion_is_not_known(change: dict[str, Any]) -> None:
    save_profile(KEY, PROFILE)
    assert load_profile(replace(KEY, **change)) is None
    assert load_profile(KEY) == PROFILE


def test_profile_and_learnt_do_not_overwrite_each_other() -> None:
    save_learnt(KEY, {"suffix": [0.5]})
    save_profile(KEY, PROFILE)
    save_learnt(KEY, {"jacobi": [0.25]})
    assert load_profile(KEY) == PROFILE
    newer = replace(KEY, library="2.0")  # acceptance is a matter of the model, not of its library
    save_profile(newer, PROFILE)
    assert load_learnt(newer) == {"suffix": [0.5], "jacobi": [0.25]}


@pytest.mark.parametrize("change", [{"seconds": {1: 0.0}}, {"seconds": {}}, {"spread": math.inf}])
def test_times_that_cannot_be_are_not_known(change: dict[str, Any]) -> None:
    save_profile(KEY, PROFILE)
    wrong = replace(PROFILE, **change)
    SECONDS.keep(KEY, wrong.seconds, wrong.rounds, wrong.spread)
    assert load_profile(KEY) is None
