"""Whose energy it is: an answer's own, or that of several."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.core.energy import SHARED, AnswerMeter, Energy, NoMeter, ReadEnergy, average_power_w

PROMPT = [5, 6, 7, 8]


class PassMeter:
    """Counts a joule for each pass of a model."""

    name = "passes"

    def __init__(self) -> None:
        self.passes = 0

    def begin(self) -> ReadEnergy:
        before = self.passes
        return lambda: Energy(float(self.passes - before))


def counted(model: Any, meter: PassMeter) -> Any:
    open_session = model.open_session

    def opened() -> Any:
        session = open_session()
        for name in ("forward", "prefill"):
            call = getattr(session, name)

            def one_more(given: Any, call: Any = call) -> Any:
                meter.passes += 1
                return call(given)

            setattr(session, name, one_more)
        return session

    model.open_session = opened
    return model


@pytest.fixture
def engine(make_engine: Any, remembers_all: Any) -> Any:
    meter = PassMeter()
    model = counted(remembers_all(), meter)
    return make_engine(model, energy=AnswerMeter(meter))


def test_prompt_and_decoding_are_told_apart(engine: Any) -> None:
    stats = engine.generate(PROMPT, max_tokens=6).stats
    assert stats.prompt_energy_j == 1.0  # one pass over the prompt
    assert stats.energy_j == 1.0 + stats.rounds
    assert stats.joules_per_token == stats.rounds / stats.predicted_n
    assert stats.energy_unknown is None


def test_answers_in_turns_do_not_know_their_own(engine: Any) -> None:
    with engine.fork() as other:
        first = engine.generate(PROMPT, max_tokens=6, stream=True)
        next(first)
        whole = other.generate(PROMPT, max_tokens=4)  # while nothing was asked of the first
        shared = first.finish()
    assert whole.stats.energy_j is not None
    assert shared.stats.energy_j is None and shared.stats.energy_unknown == SHARED
    assert engine.generate(PROMPT, max_tokens=2).stats.energy_j is not None


def test_an_answer_that_began_beside_another_is_shared_too(engine: Any) -> None:
    energy = engine.parts.energy
    with energy.turns.turn():
        stats = engine.generate(PROMPT, max_tokens=2).stats
    assert stats.energy_unknown == SHARED


def test_what_is_not_known_has_its_reason(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(), energy=AnswerMeter(NoMeter("no counters here")))
    stats = engine.generate(PROMPT, max_tokens=2).stats.to_dict()
    assert (stats["energy_j"], stats["joules_per_token"]) == (None, None)
    assert stats["energy_unknown"] == "no counters here"


def test_idle_draw_is_not_waited_for_where_nothing_tells_it() -> None:
    def never(seconds: float) -> None:
        raise AssertionError

    assert average_power_w(NoMeter("no counters here"), 9.0, never) == (None, "no counters here")
