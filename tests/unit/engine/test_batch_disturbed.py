"""Conversations that share passes while others are cancelled, fail, fill their context or are
closed: each text is the one that is written alone, and nothing is left in the batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine import decoder
from edge_spec.engine.batch import Batch
from edge_spec.engine.engine import Engine
from edge_spec.errors import ContextFullError, EdgeSpecError
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB, CONTEXT = 260, 96
PROMPTS = [list(b"ab ab ab ab ab"), list(b"x y x y x y"), list(b"one two one two"), list(b"hello")]
OTHERS = ("cancelled", "left", "raises", "memory", "full", "closed")
ROUNDS = 6


def endless(tokens: tuple[int, ...]) -> np.ndarray:
    logits = random_logits(VOCAB, order=3)(tokens)
    logits[256:] = -100.0  # special tokens, of which some end a text
    return logits


class Model(ScriptedModel):
    """Every fifth pass that several share fails, and so do passes of a session that is `short`."""

    def __init__(self) -> None:
        super().__init__(endless, VOCAB, CONTEXT)
        self.short: set[Session] = set()
        self.num_shared = self.num_failed = self.num_closed = 0

    def open_session(self) -> ScriptedSession:
        return Session(self)

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        self.num_shared += 1
        outs = super().forward_together(parts, num_rows)
        if self.num_shared % 5 == 0:
            self.num_failed += 1
            raise MemoryError
        return outs

    def close(self) -> None:
        self.num_closed += 1


class Session(ScriptedSession):
    _model: Model

    def forward(self, tree: TokenTree) -> Forward:
        assert not self._model.num_closed
        time.sleep(2e-4)  # others come meanwhile
        if self in self._model.short:
            raise MemoryError
        return super().forward(tree)


def engine_of(make_engine: Any) -> tuple[Engine, Model]:
    model = Model()
    engine: Engine = make_engine(
        model, [SuffixDrafter()], FixedPolicy(4, min_confidence=0.0), batch=Batch(model)
    )
    return engine, model


def text(engine: Engine, prompt: Sequence[int], count: int = 16) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=count).tokens]


def test_nobody_is_disturbed_and_nothing_is_left(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_of(make_engine)
    batch = engine.parts.batch
    batch.prepare_for(8)
    batch.settle()
    monkeypatch.setattr(batch._rests, "rest", lambda: None)
    alone = [text(engine, prompt) for prompt in PROMPTS]
    raising: set[int] = set()
    verify = decoder.verify

    def verified(*arguments: Any) -> Any:
        """As where a constraint or a processor of the user's raises."""
        if get_ident() in raising:
            raise RuntimeError("of the user's own")
        return verify(*arguments)

    monkeypatch.setattr(decoder, "verify", verified)

    def undisturbed(number: int) -> None:
        with engine.fork() as fork:
            for _ in range(ROUNDS):
                assert text(fork, PROMPTS[number]) == alone[number]

    def disturbing(kind: str) -> None:
        drawn, fork = random.Random(kind), engine.fork()
        for _ in range(ROUNDS):
            if kind == "full":
                with pytest.raises(ContextFullError):
                    fork.generate([7] * (CONTEXT + 1))
                assert len(text(fork, PROMPTS[0], 1000)) == CONTEXT - len(PROMPTS[0]) + 1
                continue
            generation = fork.generate(PROMPTS[2], max_tokens=40, stream=True)
            for _ in range(drawn.randint(1, 6)):
                next(generation)
            if kind == "cancelled":
                generation.cancel()
                assert generation.finish().finish_reason == "cancelled"
            elif kind == "left":
                generation.close()
            elif kind == "closed":
                fork.close()
                fork = engine.fork()
            else:
                failing: Any = (raising, get_ident())
                if kind == "memory":
                    failing = model.short, fork._session
                failing[0].add(failing[1])
                with pytest.raises((RuntimeError, EdgeSpecError)):
                    generation.finish()
                failing[0].discard(failing[1])
            assert text(fork, PROMPTS[2]) == alone[2]
        fork.close()

    calls: list[tuple[Callable[[Any], None], Any]] = [(disturbing, kind) for kind in OTHERS]
    calls += [(undisturbed, number) for number in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(calls)) as threads:
        for each in [threads.submit(call, argument) for call, argument in calls]:
            each.result(120)
    assert model.num_shared > model.num_failed > 0
    assert not batch._queue and not batch.active and not batch._is_running
    engine.close()
    assert model.num_closed == 1
