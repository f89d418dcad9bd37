"""Drafting while the target verifies: the text stays as it is, and nobody waits for the draft."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.draft_overlap import OverlappedDrafting, OverlapTrial
from edge_spec.errors import DeviceMemoryError
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB = 12
PROMPT = [1, 2, 0, 1]
WAIT_S = 60  # at most, for what comes at once unless it never comes
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=3)

TARGET = random_logits(VOCAB, order=3, scale=6.0)
OTHER = random_logits(VOCAB, order=2, scale=6.0)


def half_right(tokens: tuple[int, ...]) -> np.ndarray:
    return TARGET(tokens) if sum(tokens[-3:]) % 2 else OTHER(tokens)


DRAFTS = {"perfect": TARGET, "half right": half_right, "useless": OTHER}


class DraftSession(ScriptedSession):
    """Does `on_pass` before each pass on another thread than the test's."""

    on_pass: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.passes_meanwhile = 0

    def forward(self, tree: TokenTree) -> Forward:
        if threading.current_thread() is not threading.main_thread():
            self.passes_meanwhile += 1
            self.on_pass()
        return super().forward(tree)


class Drafting(DraftModelDrafter):
    """Says when it has looked at twelve paths ahead, those that it has read already included."""

    def __init__(self, session: DraftSession, model: ScriptedModel, most: int = 12) -> None:
        super().__init__(model, session, VOCAB, anticipates=True)
        self.done = threading.Event()
        self._most = most

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        left = iter(range(self._most))
        try:
            super().anticipate(lambda: next(left, None) is None or stopped())
        finally:
            self.done.set()


class TargetSession(ScriptedSession):
    """Scores no faster than `until` is set, where the draft goes on meanwhile."""

    def __init__(self, model: ScriptedModel, drafter: Any, until: threading.Event) -> None:
        super().__init__(model)
        self._drafter, self._until = drafter, until
        self.error: BaseException | None = None

    def forward(self, tree: TokenTree) -> Forward:
        if self._drafter.anticipates:
            assert self._until.wait(WAIT_S)
            self._until.clear()
            if self.error is not None:
                raise self.error
        return super().forward(tree)


class Pair:
    """A target and a draft on scripted models, and the loop over both."""

    def __init__(
        self, next_logits: Any, branches: bool = False, trial: OverlapTrial | None = None
    ) -> None:
        model = ScriptedModel(next_logits, VOCAB)
        self.draft = DraftSession(model)
        self.drafter = Drafting(self.draft, model)
        self.guarded = GuardedDrafter(self.drafter, VOCAB)
        target = ScriptedModel(TARGET, VOCAB)
        self.target = TargetSession(target, self.guarded, self.drafter.done)
        self.anticipation = OverlappedDrafting([self.guarded], trial)
        policy = FixedPolicy(max_draft_tokens=3, branches=branches)
        self.decoder = Decoder(self.target, [self.guarded], policy, overlap=self.anticipation)
        self.rounds: list[RoundStats] = []

    def decode(self, params: SamplingParams = GREEDY, count: int = 40) -> Any:
        self.target.rollback(0)
        self.target.prefill(PROMPT[:-1])
        limits = GenerationLimits(count, frozenset(), 512, 64)
        return self.decoder.decode(PROMPT, Sampler(params, PROMPT), limits, self.rounds.append)

    def text(self, params: SamplingParams = GREEDY) -> list[int]:
        return [token.id for decoded in self.decode(params) for token in decoded]


@pytest.mark.parametrize("quality", DRAFTS)
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_the_text_and_its_rounds_are_those_without(
    quality: str, branches: bool, params: SamplingParams, decode: Any
) -> None:
    pair = Pair(DRAFTS[quality], branches)
    written = pair.text(params)
    pair.anticipation.close()
    plain = decode(ScriptedModel(TARGET, VOCAB), PROMPT, params=params, max_tokens=40)
    assert written == plain.tokens
    model = ScriptedModel(DRAFTS[quality], VOCAB)
    run = decode(
        ScriptedModel(TARGET, VOCAB),
        PROMPT,
        [DraftModelDrafter(model, model.open_session(), VOCAB)],
        params=params,
        max_tokens=40,
        policy=FixedPolicy(max_draft_tokens=3, branches=branches),
    )
    # Draft tokens are the same ones, only made earlier: so are all outcomes.
    outcomes = [(each.num_draft_tokens, each.num_accepted) for each in pair.rounds]
    assert outcomes == [(each.num_draft_tokens, each.num_accepted) for each in run.rounds]
    assert not any(each.anticipated for each in run.rounds)
    ready = sum(each.anticipated for each in pair.rounds)
    assert pair.draft.passes_meanwhile > 0 and not pair.rounds[0].anticipated
    if quality == "perfect" and not branches:
        assert ready >= len(pair.rounds) - 2


def test_a_slow_draft_delays_the_target_by_the_pass_that_it_is_in() -> None:
    """Each of its passes lasts until the target has scored and asked it to stop."""
    pair = Pair(TARGET)
    entered = threading.Event()

    def on_pass() -> None:
        entered.set()
        assert pair.anticipation._stopped.wait(WAIT_S)

    pair.draft.on_pass = on_pass  # type: ignore[method-assign]
    pair.target._until = entered
    written = pair.text()
    pair.anticipation.close()
    assert len(written) == 40 and pair.guarded.fault is None
    anticipating = sum(each.plain_reason is None for each in pair.rounds)
    assert 0 < pair.draft.passes_meanwhile <= anticipating


def test_a_draft_that_dies_meanwhile_is_dropped_and_the_text_goes_on(
    decode: Any, caplog: Any
) -> None:
    pair = Pair(TARGET)

    def on_pass() -> None:
        if pair.draft.passes_meanwhile == 3:
            raise RuntimeError("the device was lost")

    pair.draft.on_pass = on_pass  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "edge_spec"):
        written = [pair.text(), pair.text()]
    pair.anticipation.close()
    plain = decode(ScriptedModel(TARGET, VOCAB), PROMPT, max_tokens=40)
    assert written == [plain.tokens] * 2
    assert pair.guarded.fault is not None
    (record,) = caplog.records
    assert "(RuntimeError: the device was lost)" in record.getMessage()
    assert pair.draft.passes_meanwhile == 3


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), DeviceMemoryError)],
)
def test_after_an_interrupt_nobody_uses_the_draft_and_the_next_text_is_right(
    error: BaseException, told: type[BaseException], decode: Any
) -> None:
    pair = Pair(TARGET)
    pair.target.error = error
    with pytest.raises(told):
        pair.text()
    assert pair.anticipation._running is not None and pair.anticipation._running.done()
    pair.target.error = None
    plain = decode(ScriptedModel(TARGET, VOCAB), PROMPT, max_tokens=40)
    assert pair.text() == plain.tokens
    pair.anticipation.close()


def test_a_text_that_is_ended_early_leaves_nothing_running() -> None:
    pair = Pair(TARGET)
    rounds = pair.decode()
    next(rounds), next(rounds)
    rounds.close()
    assert pair.anticipation._running is not None and pair.anticipation._running.done()
    threads = _drafting_threads()
    assert threads  # one for all rounds
    pair.anticipation.close()
    assert not [thread for thread in threads if thread.is_alive()]


def _drafting_threads() -> Sequence[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("edge-spec-draft")]
