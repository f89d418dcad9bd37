"""A smaller model that drafts: the text stays as it is, and no token is read twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Capabilities
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, random_logits
from fixtures.counting_session import CountingSession

VOCAB = 40
PROMPT = [3, 1, 4, 1, 5]

NextLogits = Callable[[tuple[int, ...]], np.ndarray]


def sharp(seed: int = 0, vocab_size: int = VOCAB, order: int = 2) -> NextLogits:
    """So far apart that the likeliest token has nearly all of the probability."""
    logits = random_logits(vocab_size, order=order + 1, scale=20.0)
    return lambda tokens: logits((seed, *tokens[-order:]))


def drafter_of(
    next_logits: NextLogits, vocab_size: int = VOCAB, target_vocab: int = VOCAB, **options: Any
) -> tuple[DraftModelDrafter, CountingSession]:
    model = ScriptedModel(next_logits, vocab_size, options.get("context_length", 512))
    max_rows = options.get("max_rows", 64)
    model.capabilities = Capabilities(max_rows, trees=False, rollback=True, hidden_states=False)
    session = CountingSession(model)
    return DraftModelDrafter(model, session, target_vocab), session


def budget(count: int, min_reach: float = 0.0) -> Budget:
    return Budget(count, 64, branches=False, min_reach=min_reach)


def half_right(tokens: tuple[int, ...]) -> np.ndarray:
    """The target's own choice after every other token."""
    return sharp(0 if sum(tokens[-3:]) % 2 else 1)(tokens)


DRAFTS = {"perfect": sharp(0), "half right": half_right, "useless": sharp(7)}


@pytest.mark.parametrize("quality", DRAFTS)
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_any_draft_gives_the_plain_greedy_text(
    quality: str, max_rows: int, decode: Any, greedy: Any
) -> None:
    model = ScriptedModel(sharp(0), VOCAB)
    drafter, _ = drafter_of(DRAFTS[quality], max_rows=max_rows)
    policy = FixedPolicy(branches=False)
    run = decode(model, PROMPT, [drafter], max_tokens=60, policy=policy)
    assert run.tokens == greedy(model, PROMPT, 60)
    accepted = sum(round.num_accepted for round in run.rounds)
    proposed = sum(round.num_draft_tokens for round in run.rounds)
    assert {"perfect": accepted == proposed, "half right": 0 < accepted < proposed}.get(
        quality, accepted < proposed / 4
    )
    assert len(run.rounds) <= 60 - accepted


def test_a_text_beyond_the_drafts_context_is_not_drafted(decode: Any, greedy: Any) -> None:
    drafter, session = drafter_of(sharp(0), context_length=16)
    model = ScriptedModel(sharp(0), VOCAB)
    run = decode(model, PROMPT, [drafter], max_tokens=40)
    assert run.tokens == greedy(model, PROMPT, 40)
    assert sum(round.num_accepted for round in run.rounds) > 4
    assert len(session.committed) <= 16
    session.taken()
    for length in (17, 18, 300):
        drafter.begin([1] * length)
        assert len(drafter.propose(1, budget(8))) == 1
    assert session.taken() == []
    drafter.begin([1] * 16)  # the last that fits, and one draft token after it
    assert len(drafter.propose(1, budget(8))) == 2


@pytest.mark.parametrize(("draft_vocab", "target_vocab"), [(VOCAB + 9, VOCAB), (VOCAB, VOCAB + 9)])
def test_padded_vocabularies(draft_vocab: int, target_vocab: int, decode: Any, greedy: Any) -> None:
    """The draft likes what the target lacks, and the target writes what the draft lacks."""

    def likes_padding(tokens: tuple[int, ...]) -> np.ndarray:
        assert max(tokens) < draft_vocab
        logits = sharp(0, draft_vocab)(tokens)
        logits[VOCAB:] += 100
        return logits

    drafter, session = drafter_of(likes_padding, draft_vocab, target_vocab)
    model = ScriptedModel(sharp(0, target_vocab), target_vocab)
    prompt = [*PROMPT, target_vocab - 1]
    run = decode(model, prompt, [drafter], max_tokens=80)
    assert run.tokens == greedy(model, prompt, 80)
    assert sum(round.num_draft_tokens for round in run.rounds) > 0
    assert max(session.committed) < VOCAB
    if target_vocab > draft_vocab:
        assert max(run.tokens) >= draft_vocab  # otherwise nothing was tried


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_more_is_drafted_than_the_budget_allows(count: int) -> None:
    drafter, session = drafter_of(sharp(0))
    drafter.begin(PROMPT)
    assert len(drafter.propose(PROMPT[-1], budget(count))) == 1 + count
    assert len(session.taken()) == count
