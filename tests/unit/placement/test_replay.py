"""Recorded texts decoded again: the same rounds as with the model, at costs that are given."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.control.policy import FixedPolicy, Policy
from edge_spec.core.metrics import Stats
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.placement.replay import Charged, DraftCost, Recording, VirtualClock, record, replay
from edge_spec.testing import ScriptedModel, random_logits

VOCAB = 12  # small: texts repeat themselves soon
PROMPTS = ([1, 2, 3], [4, 5], [6, 1, 2, 3, 1, 2])
TOKENS = 60


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(random_logits(VOCAB), VOCAB)


@pytest.fixture
def recordings(model: ScriptedModel) -> list[Recording]:
    session = model.open_session()
    return [record(session, prompt, TOKENS, (), "test") for prompt in PROMPTS]


def decoded(model: ScriptedModel, prompt: list[int], drafter: Drafter) -> Stats:
    session, stats = model.open_session(), Stats()
    session.prefill(prompt[:-1])
    policy = FixedPolicy(4, min_confidence=0.1, branches=False)
    limits = GenerationLimits(TOKENS, frozenset(), 512, 64)
    sampler = Sampler(SamplingParams(), prompt)
    for _ in Decoder(session, [drafter], policy).decode(prompt, sampler, limits, stats.observe):
        pass
    return stats


def fixed(clock: VirtualClock) -> tuple[list[Drafter], Policy]:
    return [SuffixDrafter()], FixedPolicy(4, min_confidence=0.1, branches=False)


def test_the_rounds_are_those_of_the_model(
    model: ScriptedModel, recordings: list[Recording]
) -> None:
    drafter = SuffixDrafter()  # one for all texts, as in a session
    for stats, prompt in zip(
        replay(recordings, VOCAB, fixed, lambda rows, context: 1.0), PROMPTS, strict=True
    ):
        expected = decoded(model, prompt, drafter)
        assert expected.draft_n_accepted > 10
        assert stats.acceptance_histogram == expected.acceptance_histogram
        assert (stats.rounds, stats.predicted_n) == (expected.rounds, TOKENS)
        assert stats.draft_n == expected.draft_n


def test_time_is_what_passes_and_drafters_cost(recordings: list[Recording]) -> None:
    cost = DraftCost(propose_s=0.01, a_row_s=0.001, observe_s=0.1)
    asked: list[tuple[int, int]] = []

    def pass_s(rows: int, context: int) -> float:
        asked.append((rows, context))
        return rows + 0.5

    def charged(clock: VirtualClock) -> tuple[list[Drafter], Policy]:
        [drafter], policy = fixed(clock)
        return [Charged(drafter, cost, clock)], policy

    [stats] = replay(recordings[:1], VOCAB, charged, pass_s)
    assert stats.verify_ms == pytest.approx(1e3 * sum(rows + 0.5 for rows, _ in asked))
    # The last round has no room for a draft token, and asks for none.
    drafting_s = 0.11 * stats.rounds - 0.01 + 0.001 * stats.draft_n
    assert stats.draft_ms == pytest.approx(1e3 * drafting_s, rel=0.02)
    assert stats.predicted_ms == pytest.approx(stats.draft_ms + stats.verify_ms)
    contexts = [context for _, context in asked]
    assert contexts[0] == len(PROMPTS[0]) - 1 and contexts == sorted(contexts)


def test_without_drafters_every_token_takes_a_step(recordings: list[Recording]) -> None:
    stats = replay(recordings, VOCAB, lambda clock: ([], FixedPolicy()), lambda rows, context: 2.0)
    assert [each.predicted_per_second for each in stats] == [pytest.approx(0.5)] * len(PROMPTS)


def test_drafters_that_read_logits_find_those_of_the_text(
    model: ScriptedModel, recordings: list[Recording]
) -> None:
    """Rows of the text have the recorded logits, so plain rounds teach the same."""
    replayed, real = RecyclingDrafter(), RecyclingDrafter()
    plain = FixedPolicy(1, min_confidence=1.0, branches=False)
    replay(recordings[:1], VOCAB, lambda clock: ([replayed], plain), lambda rows, context: 1.0)
    session = model.open_session()
    session.prefill(PROMPTS[0][:-1])
    limits = GenerationLimits(TOKENS, frozenset(), 512, 64)
    rounds = Decoder(session, [real], plain).decode(
        PROMPTS[0], Sampler(SamplingParams(), PROMPTS[0]), limits, lambda stats: None
    )
    for _ in rounds:
        pass
    first, second = (each.state_dict()["entries"] for each in (replayed, real))
    np.testing.assert_array_equal(first, second)


def test_a_recording_ends_with_the_stop_token(model: ScriptedModel) -> None:
    session = model.open_session()
    whole = record(session, PROMPTS[0], TOKENS, ())
    stop = whole.tokens[7]
    cut = record(session, PROMPTS[0], TOKENS, {stop})
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert cut.top.shape == cut.gaps.shape == (len(cut.tokens), 8)
    assert (cut.top[:, 0] == cut.tokens).all() and (cut.gaps[:, 0] == 0).all()
    assert (np.diff(cut.gaps, axis=1) >= 0).all()
