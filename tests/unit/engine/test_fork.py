"""Engines that share their weights: each has its own text, and the last one closes the models."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceMemoryError
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB = 260  # of the byte tokenizer
PROMPTS = [list(b"hello world"), list(b"hello there"), list(b"other"), list(b"ab ab ab ab")]


class Model(ScriptedModel):
    """Counts what is open."""

    def __init__(self, order: int = 10_000) -> None:
        super().__init__(random_logits(VOCAB, order=order), VOCAB)
        self.num_sessions = 0
        self.num_closed = 0

    def open_session(self) -> ScriptedSession:
        self.num_sessions += 1
        return Session(self)

    def close(self) -> None:
        assert not self.num_sessions, "a session is still open"
        self.num_closed += 1


class Session(ScriptedSession):
    _model: Model

    def forward(self, tree: TokenTree) -> Forward:
        assert not self._model.num_closed
        return super().forward(tree)

    def close(self) -> None:
        super().close()
        self._model.num_sessions -= 1


def tokens(engine: Engine, prompt: Sequence[int], count: int = 20) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=count).tokens]


@pytest.fixture
def models() -> tuple[Model, Model]:
    return Model(), Model(order=2)


@pytest.fixture
def engine(make_engine: Any, models: tuple[Model, Model]) -> Engine:
    """With a draft."""
    target, smaller = models
    made: Engine = make_engine(target)
    draft = Draft(smaller, VOCAB)
    speculation_factory = made.parts.speculation_factory
    speculation_factory = replace(
        speculation_factory, setting=replace(speculation_factory.setting, drafts=[draft])
    )
    made.close()
    target.num_closed = 0
    parts = replace(
        made.parts, drafts=[draft], speculation_factory=speculation_factory, drafter="cascade"
    )
    return Engine(replace(parts, speculation=speculation_factory.choose("cascade")))


def test_forks_write_at_the_same_time_what_each_writes_alone(engine: Engine) -> None:
    alone = [tokens(engine.fork(), prompt) for prompt in PROMPTS]
    start = Barrier(4, timeout=60)

    def answer(prompt: list[int]) -> list[int]:
        with engine.fork() as fork:
            start.wait()
            return tokens(fork, prompt)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert list(threads.map(answer, PROMPTS)) == alone
    assert tokens(engine, PROMPTS[0]) == alone[0]


def test_a_fork_has_a_text_of_its_own(engine: Engine) -> None:
    engine.generate(PROMPTS[0], max_tokens=4)
    fork = engine.fork()
    assert fork.last is None
    assert fork.generate(PROMPTS[1], max_tokens=4).stats.cached_n == 0
    assert engine.generate(PROMPTS[0], max_tokens=4).stats.cached_n == len(PROMPTS[0]) - 1
    assert engine.last is not fork.last


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_the_last_one_closes_the_models(
    order: list[int], engine: Engine, models: tuple[Model, Model]
) -> None:
    engines = [engine, engine.fork(), engine.fork()]
    assert [model.num_sessions for model in models] == [3, 3]
    for count, which in enumerate(order):
        for left in order[count:]:
            assert len(tokens(engines[left], PROMPTS[0], 3)) == 3
        for _ in range(2):  # closing twice is closing once
            engines[which].close()
        last = count == 2
        assert [model.num_closed for model in models] == [last, last]


@pytest.mark.parametrize("which", [0, 1])
def test_a_fork_that_cannot_be_made_leaves_nothing_open(
    which: int, engine: Engine, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise DeviceMemoryError("no room", remedy="None.")

    monkeypatch.setattr(models[which], "open_session", full)
    with pytest.raises(DeviceMemoryError):
        engine.fork()
    assert [model.num_sessions for model in models] == [1, 1]
    engine.close()
    assert [model.num_closed for model in models] == [1, 1]
