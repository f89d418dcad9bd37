"""Exact mode where no two widths have the same rows: plain steps decide near ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.modes import LosslessMode
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.scheduler.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
)
from edge_spec.scheduler.lossless import Losslessness, keep_promise
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB, TOKENS, NOISE = 30, 200, 0.2
PROMPTS = [[seed, 7, 3] for seed in range(10)]
PLAIN = Losslessness()
REPLAYED = Losslessness(LosslessMode.AUTO, replays=True, tie_margin=NOISE)


class NoisySession(ScriptedSession):
    """In wider passes, each logit is off by up to NOISE / 2, in another way for each row."""

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        if len(tree) > 1:
            seeds = ([len(self.committed), len(tree), row] for row in range(len(tree)))
            noise = [np.random.default_rng(seed).uniform(-0.5, 0.5, VOCAB) for seed in seeds]
            logits += NOISE * np.array(noise, np.float32)
        return Forward(logits)


class NoisyModel(ScriptedModel):
    def __init__(self) -> None:
        # Small logits: the first two are now and then close.
        super().__init__(random_logits(VOCAB, order=2, scale=1.0), VOCAB)

    def open_session(self) -> ScriptedSession:
        return NoisySession(self)


class Knowing(Drafter):
    """Drafts the text that plain decoding writes."""

    name = "knowing"

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._written = 0

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None: ...

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        ahead = self._text[self._written : self._written + min(budget.num_draft_tokens, 4)]
        return TokenTree.chain(pending, ahead)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._written += len(verdict.tokens)


def decoded(
    prompt: list[int],
    drafters: Sequence[Any],
    sampling: SamplingParams,
    lossless: Losslessness = PLAIN,
) -> tuple[list[int], list[RoundStats]]:
    model = NoisyModel()
    session = model.open_session()
    session.prefill(prompt[:-1])
    rounds: list[RoundStats] = []
    sampler = Sampler(sampling, prompt, lossless.tie_margin, sampled_drafts=False)
    limits = GenerationLimits(TOKENS, frozenset(), model.config.context_length, max_rows=16)
    decoding = Decoder(session, drafters, FixedPolicy(min_confidence=0.0), lossless)
    text = [t.id for each in decoding.decode(prompt, sampler, limits, rounds.append) for t in each]
    assert session.committed == [*prompt, *text[:-1]]
    return text, rounds


def speculation_factory(
    batch_invariance: BatchInvariance, mode: LosslessMode = LosslessMode.ALWAYS
) -> SpeculationFactory:
    return SpeculationFactory(
        DrafterContext(VOCAB),
        NoisyModel().capabilities,
        batch_invariance,
        keep_promise(mode, batch_invariance),
    )


def test_a_model_of_which_no_width_is_invariant_is_replayed() -> None:
    batch_invariance = measure_batch_invariance(NoisyModel(), USUAL_WIDTHS)
    assert batch_invariance.invariant_widths == (1,) and 0 < batch_invariance.tie_margin < 2 * NOISE
    speculation = speculation_factory(batch_invariance).choose("suffix")
    assert (
        speculation.lossless.replays
        and speculation.lossless.tie_margin == 2 * batch_invariance.tie_margin
    )
    assert not speculation_factory(BatchInvariance(0.5, (1, 2))).choose("suffix").lossless.replays
    assert speculation_factory(batch_invariance).lossless.plain_width == 1


def test_replayed_text_is_plain_text_and_mostly_drafted() -> None:
    differing = 0
    for prompt in PROMPTS:
        plain, _ = decoded(prompt, [], SamplingParams())
        noisy, _ = decoded(prompt, [Knowing(plain)], SamplingParams())
        differing += noisy != plain
        text, rounds = decoded(prompt, [Knowing(plain)], SamplingParams(), REPLAYED)
        assert text == plain
        assert sum(each.num_tokens for each in rounds) == TOKENS
        assert sum(each.num_accepted for each in rounds) > TOKENS // 4
        assert any(each.plain_reason is PlainReason.REPLAY for each in rounds)
        assert any(each.num_tokens == 0 for each in rounds)  # the first choice was a near tie
    assert differing > 0  # or the test would prove nothing


@pytest.mark.parametrize("seed", range(3))
def test_a_draw_is_left_to_plain_steps(seed: int) -> None:
    """It has no margin that noise could be held against."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    plain, _ = decoded(PROMPTS[0], [], sampling)
    always = replace(REPLAYED, mode=LosslessMode.ALWAYS)
    text, rounds = decoded(PROMPTS[0], [Knowing(plain)], sampling, always)
    assert text == plain
    assert {each.plain_reason for each in rounds} == {PlainReason.UNSUPPORTED}


def test_only_texts_that_are_equal_at_any_price_are_sampled_by_plain_steps() -> None:
    found = BatchInvariance(0.1, (1,))
    for mode in (LosslessMode.AUTO, LosslessMode.ALWAYS):
        speculation = speculation_factory(found, mode).choose("suffix")
        assert speculation.lossless.replays
        assert speculation.lossless.plain_samples == (mode is LosslessMode.ALWAYS)
    sampling = SamplingParams(temperature=1.0, seed=1)
    plain, _ = decoded(PROMPTS[0], [], sampling)
    _, rounds = decoded(PROMPTS[0], [Knowing(plain)], sampling, REPLAYED)
    assert sum(each.num_accepted for each in rounds) > 0
    assert {each.plain_reason for each in rounds} <= {None, PlainReason.NO_CANDIDATE}
