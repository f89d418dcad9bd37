"""A draft whose device is lost, hangs, computes nonsense or is too small: the answer goes on
without it, which is counted, and a later answer has it again where it can."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from edge_spec.core.model import Session
from edge_spec.core.watchdog import WatchedModel
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.engine.engine import Engine
from edge_spec.testing import ScriptedModel, random_logits
from fixtures.faults import Fault, FaultKind, FaultyModel

VOCAB = 260
PROMPT = [1, 2, 1, 2, 1, 2, 3]
TOKENS = 20


def model(context_length: int = 512) -> ScriptedModel:
    return ScriptedModel(random_logits(VOCAB, scale=6.0), VOCAB, context_length)


class LostModel(ScriptedModel):
    """Opens no session any more once it `is_lost`, and those that are open score nothing."""

    def __init__(self) -> None:
        super().__init__(self._scored, VOCAB)
        self.is_lost, self.num_opened = False, 0
        self._right = random_logits(VOCAB, scale=6.0)

    def _scored(self, tokens: tuple[int, ...]) -> Any:
        if self.is_lost:
            raise OSError("the device was removed")
        return self._right(tokens)

    def open_session(self) -> Any:
        self.num_opened += 1
        if self.is_lost:
            raise OSError("the device was removed")
        return super().open_session()


def engine_with(make_engine: Any, draft: Draft) -> Engine:
    """One whose only drafter is asked in every round."""
    with make_engine(model()) as engine:
        parts = engine.parts
    setting = replace(parts.speculation_factory.setting, drafts=[draft])
    factory = replace(parts.speculation_factory, setting=setting, costs=None)
    speculation = factory.choose("draft-model")
    return Engine(
        replace(parts, drafts=[draft], speculation_factory=factory, speculation=speculation)
    )


def answer(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(PROMPT, max_tokens=TOKENS).tokens]


@pytest.fixture
def right(make_engine: Any) -> list[int]:
    with make_engine(model()) as engine:
        return answer(engine)


def test_a_device_that_is_gone_is_asked_for_ever_more_seldom(
    make_engine: Any, right: list[int], caplog: Any
) -> None:
    lost = LostModel()
    with (
        engine_with(make_engine, Draft(lost, VOCAB)) as engine,
        caplog.at_level(logging.WARNING, "edge_spec"),
    ):
        assert answer(engine) == right
        lost.is_lost, lost.num_opened = True, 0
        for _ in range(16):
            assert answer(engine) == right
            assert engine.last.stats.plain_reasons["draft_failed"] > 0
        # After answers 1, 2, 4, 8 and no others; the first one failed in its rounds.
        assert lost.num_opened == 4 and len(caplog.records) == 1
        lost.is_lost = False
        while engine.last.stats.failed_drafters:
            assert answer(engine) == right
        assert engine.last.stats.draft_n_accepted > 0


def test_a_draft_comes_back_when_its_pass_has_ended_and_not_before(
    make_engine: Any, right: list[int]
) -> None:
    hanging = Fault(FaultKind.HANGS, "forward", 3)
    draft = Draft(model(), VOCAB)
    draft.model = WatchedModel(FaultyModel(model(), [hanging]), least_s=0.1, first_s=0.1, times=0)
    with engine_with(make_engine, draft.fork()) as engine:
        for _ in range(2):
            assert answer(engine) == right
            assert engine.last.stats.failed_drafters == ("draft-model",)
        hung: Session = engine.parts.drafts[0]._session
        assert hung.hangs  # type: ignore[attr-defined]
        hanging.released.set()
        hung._worker._wait()  # type: ignore[attr-defined]
        for _ in range(2):  # after the second failure it rests for an answer
            assert answer(engine) == right
        assert engine.last.stats.failed_drafters == () and engine.last.stats.draft_n_accepted > 0


def test_a_text_beyond_the_drafts_context_goes_on_without_it(
    make_engine: Any, right: list[int], caplog: Any
) -> None:
    draft = Draft(model(context_length=len(PROMPT) + 6), VOCAB)
    with engine_with(make_engine, draft) as engine, caplog.at_level(logging.WARNING, "edge_spec"):
        assert answer(engine) == right
        stats = engine.last.stats
        assert stats.draft_n_accepted > 0 and stats.plain_reasons["draft_full"] > 1
        assert stats.failed_drafters == ()
        assert answer(engine) == right
    (record,) = caplog.records
    assert "context of 13 tokens is full" in record.getMessage()
