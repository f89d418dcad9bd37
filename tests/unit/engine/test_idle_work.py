"""What an engine tells whoever learns while it is idle."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.engine.engine import Engine


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def take(self, *given: Any) -> None: ...

    def head(self) -> None: ...

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(make_engine: Any, remembers_all: Any, recorder: Recorder) -> Any:
    engine: Engine = make_engine(remembers_all(), learner=recorder)
    return engine


def test_an_engine_says_when_it_answers_and_closes_the_learner_first(
    engine: Engine, recorder: Recorder
) -> None:
    engine.generate("hello", max_tokens=2)
    assert recorder.calls == ["pause", "resume"]
    engine.close()
    assert recorder.calls[-1] == "close"


def test_learning_ends_with_the_last_engine(engine: Engine, recorder: Recorder) -> None:
    engine.fork().close()
    assert recorder.calls == []
    engine.close()
    assert recorder.calls == ["close"]
