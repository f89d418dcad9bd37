"""Conversations that wait in memory for their next turn."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.core.metrics import PlainRate
from edge_spec.engine import prompt_cache
from edge_spec.engine.conversation import Conversation
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import KeptState, PromptCache
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, random_logits

BYTES = 1000


def tokens(seed: int, count: int = 600) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def kept(text: np.ndarray, num_bytes: int = BYTES) -> KeptState:
    return KeptState(text, {"kv": np.zeros(num_bytes, np.uint8)}, num_prompted=len(text))


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "free_bytes", lambda: None)


def test_the_one_that_a_prompt_goes_on_from_is_taken_and_no_longer_kept() -> None:
    conversations = PromptCache()
    one, other = kept(tokens(1)), kept(tokens(2))
    conversations.keep(one)
    conversations.keep(other)
    prompt = np.concatenate([one.tokens, tokens(3, 50)])
    assert conversations.conversation(prompt, 600) is None  # no more than what is held
    assert conversations.conversation(prompt, 500) == (one, 600)
    assert conversations.num_bytes == BYTES and conversations.conversation(prompt, 0) is None


@pytest.mark.parametrize("noise, is_taken", [(0.0, True), (0.5, False)])
def test_what_goes_on_from_a_kept_one_is_as_noisy_as_its_decoder(
    noise: float, is_taken: bool
) -> None:
    """And never as quiet as what it goes on from."""
    session = ScriptedModel(random_logits(9), 9, context_length=4096).open_session()
    decoder = Decoder(session, [], FixedPolicy(), Losslessness(tie_margin=0.1))
    conversation = Conversation(decoder, PlainRate())
    state = {"committed": tokens(1)}
    conversation.prompts.keep(KeptState(tokens(1), state, num_prompted=600, noise=noise))
    conversation.reuse([*tokens(1).tolist(), 5])
    assert (session.length, conversation.noise) == (600 * is_taken, 0.1)


def test_those_that_were_used_last_stay_within_the_bytes() -> None:
    conversations = PromptCache(max_bytes=2 * BYTES)
    texts = [tokens(seed, 1000) for seed in range(3)]
    for text in texts[:2]:
        conversations.keep(kept(text))
    assert conversations.conversation(texts[0][:400], 0) is not None  # lent
    conversations.keep(kept(texts[2]))
    assert conversations.num_bytes == 2 * BYTES
    assert [conversations.conversation(text, 0) is None for text in texts] == [False, True, False]
    conversations.keep(kept(tokens(9), 2 * BYTES + 1))
    assert conversations.num_bytes == 0


def test_nothing_is_kept_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "free_bytes", lambda: 2 * BYTES)
    conversations = PromptCache()
    conversations.keep(kept(tokens(1)))
    assert conversations.num_bytes == 0
