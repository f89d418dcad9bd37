"""What fails is told, what was written stays, and the next answer is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest

from edge_spec.core.modes import DraftOverlap
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.core.watchdog import WatchedModel, _Worker
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import FinishReason
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, HungError, SessionError
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits
from fixtures.fault_matrix import check_faults
from fixtures.faults import Fault, FaultKind, FaultyModel

VOCAB = 260
PROMPT = [1, 2, 1, 2, 1, 2, 3]
OTHER = [5, 6, 5, 6, 5, 7]
SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=1, seed=3, top_k=4, repetition_penalty=1.1),
]


def model() -> ScriptedModel:
    return ScriptedModel(random_logits(VOCAB, scale=6.0), VOCAB)


def paired(engine: Engine, draft: Draft, overlap: DraftOverlap = DraftOverlap.OFF) -> Any:
    """The engine's parts, with a draft."""
    speculation_factory = engine.parts.speculation_factory
    setting = replace(speculation_factory.setting, drafts=[draft])
    speculation_factory = replace(speculation_factory, setting=setting, draft_overlap=overlap)
    return replace(engine.parts, drafts=[draft], speculation_factory=speculation_factory)


def ids(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    result = engine.generate(prompt, max_tokens=20, **options)
    return [token.id for token in result.tokens]


@pytest.mark.parametrize(
    ("drafters", "overlap"),
    [
        ("suffix,recycling", DraftOverlap.OFF),
        ("cascade", DraftOverlap.OFF),
        ("draft-model", DraftOverlap.ON),
    ],
)
def test_an_engine_survives_every_fault(
    make_engine: Any, drafters: str, overlap: DraftOverlap
) -> None:
    with make_engine(model()) as engine:
        parts = paired(engine, Draft(model(), VOCAB, anticipates=True), overlap)
        report = check_faults(
            parts, [PROMPT, OTHER], [drafters], steps=[2], max_tokens=10, hang_limit_s=0.2
        )
    assert [str(case) for case in report.cases if case.lost is not None] == []
    assert report.injected == report.survived > 30
    hangs = report.by_kind()["hangs"]["injected"]
    assert (hangs > 0) == (drafters != "suffix,recycling")


def raise_error(drafter: Any, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("where", "broken", "lost"),
    [
        ("edge_spec.core.session_errors.TranslatedErrors.__exit__", lambda *error: None, "target"),
        ("edge_spec.drafters.composite.GuardedDrafter._drop", raise_error, "suffix"),
    ],
)
def test_a_fault_that_is_not_survived_is_counted(
    make_engine: Any, monkeypatch: Any, where: str, broken: Any, lost: str
) -> None:
    monkeypatch.setattr(where, broken)
    with make_engine(model()) as engine:
        report = check_faults(engine.parts, [PROMPT, OTHER], ["suffix"], steps=[2], max_tokens=10)
    assert 0 < report.survived < report.injected
    assert {case.part for case in report.cases if case.lost is not None} == {lost}


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize(
    ("kind", "told", "words"),
    [
        ("raises", SessionError, "RuntimeError: forward failed"),
        ("memory", DeviceMemoryError, "too little memory"),
        ("nan", SessionError, "no numbers"),
        ("shape", SessionError, "scores of shape"),
    ],
)
def test_what_was_written_before_the_target_failed_stays(
    make_engine: Any, params: SamplingParams, kind: str, told: type[Exception], words: str
) -> None:
    with make_engine(model()) as engine:
        right = ids(engine, sampling=params)
    with make_engine(FaultyModel(model(), [Fault(FaultKind(kind), "forward", 5)])) as engine:
        generation = engine.generate(PROMPT, max_tokens=20, sampling=params, stream=True)
        text = ""
        with pytest.raises(told, match=words):
            for chunk in generation:
                text += chunk.text
        result = generation.result
        assert engine.last is result and result.finish_reason is FinishReason.ERROR
        assert [token.id for token in result.tokens] == right[:4]
        assert text == result.text == "".join(token.text for token in result.tokens)
        assert ids(engine, sampling=params) == right


class OneNan(ScriptedModel):
    """One token's score is no number, from the third text on that is scored."""

    def __init__(self, bad: float) -> None:
        sound, self.num_scored = random_logits(VOCAB, scale=6.0), 0

        def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
            logits = sound(tokens)
            self.num_scored += 1
            if self.num_scored >= 3:
                logits[7] = bad
            return logits

        super().__init__(next_logits, VOCAB)


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_score_that_is_no_number_ends_the_answer(
    make_engine: Any, params: SamplingParams, bad: float
) -> None:
    with make_engine(OneNan(bad)) as engine:
        with pytest.raises(SessionError, match="no numbers"):
            engine.generate(PROMPT, max_tokens=20, sampling=params)
        assert len(engine.last.tokens) == 2


class LostSession(ScriptedSession):
    def close(self) -> None:
        raise RuntimeError("the device is gone")


def test_the_models_are_closed_even_where_a_draft_cannot_be(make_engine: Any) -> None:
    with make_engine(model()) as engine:
        smaller = Closed(random_logits(VOCAB), VOCAB)
        smaller.open_session = lambda: LostSession(smaller)  # type: ignore[method-assign]
        target = Closed(random_logits(VOCAB), VOCAB)
        parts = replace(paired(engine, Draft(smaller, VOCAB)), model=target)
    Engine(parts).close()
    assert smaller.is_closed and target.is_closed


class Release(Event):
    """What a pass that hangs waits for."""

    held: Thread | None = None

    def wait(self, timeout: float | None = None) -> bool:
        self.held = current_thread()
        assert self.held.name == "edge-spec-pass", "nobody would give this one up"
        return super().wait(timeout)


class Patience:
    """A lock that is waited for without a limit, unless the pass after it hangs: on a slow machine
    no other one is given up."""

    def __init__(self, worker: Any, hang: Release) -> None:
        self._worker, self._hang, self._lock = worker, hang, worker._done
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while not self._lock.acquire(blocking, 0.01 if blocking else -1):
            if not blocking or self._hang.held is self._worker._thread:
                return False
        return True


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    released, begin = Release(), _Worker.__init__

    def begin_patiently(worker: Any, remedy: str) -> None:
        begin(worker, remedy)
        worker._done = Patience(worker, released)

    monkeypatch.setattr(_Worker, "__init__", begin_patiently)
    yield Fault(FaultKind.HANGS, "forward", 3, released)
    released.set()


class Closed(ScriptedModel):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("overlap", [DraftOverlap.OFF, DraftOverlap.ON])
def test_a_draft_that_hangs_is_never_touched_again(
    make_engine: Any, hanging: Fault, overlap: DraftOverlap, is_forked: bool
) -> None:
    inner = Closed(random_logits(VOCAB, scale=6.0), VOCAB)
    draft = Draft(FaultyModel(inner, [hanging]), VOCAB, anticipates=True)
    if is_forked:
        draft.close_session()
        draft = draft.fork()
    with make_engine(model()) as engine:
        parts, right = paired(engine, draft, overlap), ids(engine)
    engine = Engine(replace(parts, speculation=parts.speculation_factory.choose("draft-model")))
    assert ids(engine) == right and ids(engine) == right
    (drafter,) = engine.parts.speculation.drafters
    assert drafter.fault is not None and drafter.fault.startswith("HungError")
    assert hanging.num_calls == 3
    engine.close()
    assert not inner.is_closed  # one of its passes still runs
    hanging.released.set()


def test_a_target_that_hangs_ends_one_answer_where_a_time_out_was_given(
    make_engine: Any, hanging: Fault
) -> None:
    with make_engine(model()) as engine:
        right = ids(engine)
    watched = WatchedModel(FaultyModel(model(), [hanging]), times=0, remedy="Ask again.")
    with make_engine(watched) as engine:
        with pytest.raises(HungError, match="a pass hung for"):
            ids(engine)
        assert engine.last.finish_reason == "error"
        assert [token.id for token in engine.last.tokens] == right[:2]
        assert ids(engine) == right
    hanging.released.set()


class InterruptedWait:
    """A lock whose first wait a signal ends, as Python's own may."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waits = iter([True])
        self.release, self.locked = lock.release, lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and next(self._waits, False):
            raise KeyboardInterrupt
        return bool(self._lock.acquire(blocking, timeout))


def interrupted(session: Any) -> None:
    """A pass goes on after it."""
    session._worker._done = InterruptedWait(session._worker._done)
    with pytest.raises(KeyboardInterrupt):
        session.forward(TokenTree.chain(1))


def test_a_pass_that_an_interrupt_left_behind_ends_before_the_next() -> None:
    ended, right = Event(), random_logits(VOCAB)

    def late(tokens: tuple[int, ...]) -> np.ndarray:
        assert ended.wait(60)
        return right(tokens)

    session: Any = WatchedModel(ScriptedModel(late, VOCAB)).open_session()
    interrupted(session)
    ended.set()
    session.prefill([4, 5])
    assert (session.forward(TokenTree.chain(1)).logits[0] == right((4, 5, 1))).all()
    session.close()


def test_a_drafter_that_asks_a_draft_that_hung_is_dropped_at_once(hanging: Fault) -> None:
    session = WatchedModel(FaultyModel(model(), [hanging])).open_session()
    pending = TokenTree.chain(1)
    session.forward(pending), session.forward(pending)
    for call in (
        lambda: session.forward(pending),
        lambda: session.rollback(0),
        lambda: session.prefill([1]),
    ):
        with pytest.raises(EdgeSpecError, match="a pass hung for"):
            call()
    session.close()  # does not wait
    assert hanging.num_calls == 3


class Leaving(Closed):
    """Tells when one of its sessions was closed, too."""

    def __init__(self) -> None:
        super().__init__(random_logits(VOCAB), VOCAB)
        self.session_closed = Event()

    def open_session(self) -> ScriptedSession:
        session = super().open_session()
        session.close = self.session_closed.set  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_session_that_was_given_up_is_closed_once_its_pass_has_ended(
    hanging: Fault, ends_first: bool
) -> None:
    model = Leaving()
    watched = WatchedModel(FaultyModel(model, [hanging]))
    session: Any = watched.open_session()
    with pytest.raises(HungError):
        for _ in range(3):
            session.forward(TokenTree.chain(1))
    thread = session._worker._thread
    if ends_first:
        hanging.released.set()
        assert session._worker._done._lock.acquire(timeout=60)
    session.close()
    assert model.session_closed.is_set() == ends_first
    hanging.released.set()
    thread.join(60)
    assert model.session_closed.is_set() and not thread.is_alive()
    watched.close()
    assert model.is_closed
