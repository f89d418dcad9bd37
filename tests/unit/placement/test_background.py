"""A measurement that shares a model with answers: it waits, rests between passes, and ends."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from edge_spec.engine.engine import Engine
from edge_spec.placement.background import IdleProfiler
from edge_spec.placement.profile import ContextCosts, Profile

PROFILE = Profile((ContextCosts(0, {1: 1.0}),), 1.0, 0.0, 0.0, 1, 0.0)
PATIENCE_S = 60.0  # after which a test fails that would otherwise wait for ever
LONG_S = 3600.0


class Passes:
    """Three passes; each waits until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        self.num_begun = 0
        self.num_ended = 0
        self.is_closed = False

    def __call__(self) -> Generator[float, None, Profile]:
        try:
            for i in range(3):
                self.num_begun += 1
                self.begun.release()
                assert self.let_go.acquire(timeout=PATIENCE_S)
                self.num_ended += 1
                yield i / 3
            return PROFILE
        finally:
            self.is_closed = True

    def wait_for_begin(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def saved() -> list[Profile]:
    return []


@pytest.fixture
def profiler(passes: Passes, saved: list[Profile]) -> Iterator[IdleProfiler]:
    profiler = IdleProfiler(passes, saved.append, quiet_s=0.0)
    yield profiler
    for _ in range(3):
        passes.let_go.release()
    profiler.close()


def start_after_an_answer(profiler: IdleProfiler) -> None:
    profiler.start()
    profiler.pause()
    profiler.resume()


def ended(profiler: IdleProfiler) -> bool:
    """Waits for it."""
    profiler._thread.join(PATIENCE_S)
    return not profiler._thread.is_alive()


def test_after_an_answer_all_is_measured_and_saved_once(
    profiler: IdleProfiler, passes: Passes, saved: list[Profile]
) -> None:
    start_after_an_answer(profiler)
    for _ in range(3):
        passes.let_go.release()
    assert ended(profiler)
    assert saved == [PROFILE]


def test_nothing_runs_before_the_first_answer_has_ended(
    profiler: IdleProfiler, passes: Passes, saved: list[Profile]
) -> None:
    profiler.start()
    profiler.pause()  # the first answer begins
    profiler.close()
    assert passes.num_begun == 0 and saved == []


def test_nothing_runs_until_it_was_quiet_for_long_enough(passes: Passes) -> None:
    profiler = IdleProfiler(passes, lambda profile: None, quiet_s=LONG_S)
    start_after_an_answer(profiler)
    profiler.close()
    assert passes.num_begun == 0


def test_an_answer_waits_for_the_running_pass_and_no_other_begins(
    profiler: IdleProfiler, passes: Passes
) -> None:
    start_after_an_answer(profiler)
    passes.wait_for_begin()
    ended_before: list[int] = []

    def answer() -> None:
        profiler.pause()
        ended_before.append(passes.num_ended)

    answering = threading.Thread(target=answer)
    with profiler._changed:
        answering.start()
        assert profiler._changed.wait_for(lambda: profiler._num_answers, PATIENCE_S)
    passes.let_go.release()
    answering.join(PATIENCE_S)
    assert ended_before == [1]
    assert passes.num_begun == 1
    profiler.close()
    assert passes.num_begun == 1
    assert passes.is_closed


def test_it_goes_on_after_the_answer(
    profiler: IdleProfiler, passes: Passes, saved: list[Profile]
) -> None:
    start_after_an_answer(profiler)
    passes.wait_for_begin()
    passes.let_go.release()
    profiler.pause()
    profiler.resume()
    passes.let_go.release()
    passes.let_go.release()
    assert ended(profiler)
    assert saved == [PROFILE]


def test_of_several_answers_the_last_has_to_end(
    profiler: IdleProfiler, passes: Passes, saved: list[Profile]
) -> None:
    profiler.start()
    profiler.pause()
    profiler.pause()  # of another engine on the same model
    profiler.resume()
    assert profiler._busy
    profiler.resume()
    assert not profiler._busy
    for _ in range(3):
        passes.let_go.release()
    assert ended(profiler) and saved == [PROFILE]


def test_a_failing_measurement_harms_nobody(saved: list[Profile]) -> None:
    def failing() -> Generator[float, None, Profile]:
        yield 0.0
        raise RuntimeError("the device is gone")

    profiler = IdleProfiler(failing, saved.append, quiet_s=0.0)
    start_after_an_answer(profiler)
    assert ended(profiler)
    profiler.pause()
    profiler.resume()
    profiler.close()
    assert saved == []


def test_closing_it_twice_or_unstarted_is_nothing(passes: Passes) -> None:
    profiler = IdleProfiler(passes, lambda profile: None)
    profiler.close()
    profiler.close()
    assert passes.num_begun == 0


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

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
    engine: Engine = make_engine(remembers_all(), idle_work=recorder)
    return engine


def test_an_engine_says_when_it_answers_and_closes_the_work_first(
    engine: Engine, recorder: Recorder
) -> None:
    engine.generate("hello", max_tokens=2)
    assert recorder.calls == ["pause", "resume"]
    engine.close()
    assert recorder.calls[-1] == "close"


def test_an_answer_that_was_never_read_leaves_the_engine_idle(
    engine: Engine, recorder: Recorder
) -> None:
    engine.generate("hello", max_tokens=2, stream=True)
    with engine.without_drafting():  # ends it
        pass
    assert recorder.calls == ["pause", "resume"]


def test_a_stream_that_is_still_read_is_an_answer(engine: Engine, recorder: Recorder) -> None:
    stream = engine.generate("hello", max_tokens=4, stream=True)
    next(stream)
    assert recorder.calls == ["pause"]
    stream.close()
    assert recorder.calls == ["pause", "resume"]


def test_engines_that_share_a_model_share_its_idle_work(engine: Engine, recorder: Recorder) -> None:
    with engine.fork() as other:
        stream, others = (
            each.generate("hello", max_tokens=4, stream=True) for each in (engine, other)
        )
        next(stream), next(others)
        stream.close()
        assert recorder.calls == ["pause", "pause", "resume"]
        others.close()
        assert recorder.calls == ["pause", "pause", "resume", "resume"]


def test_idle_work_ends_with_the_last_engine(engine: Engine, recorder: Recorder) -> None:
    engine.fork().close()
    assert recorder.calls == []
    engine.close()
    assert recorder.calls == ["close"]


def test_a_profile_that_cannot_be_saved_is_no_error(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(profile: Profile) -> None:
        raise OSError("no space left")

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    profiler = IdleProfiler(passes, save, quiet_s=0.0)
    profiler.start()
    profiler.pause()
    profiler.resume()
    passes.let_go.release(3)
    profiler._thread.join(PATIENCE_S)
    assert not profiler._thread.is_alive() and raised == []
    profiler.close()
