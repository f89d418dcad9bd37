"""Conversations that wait in memory for their next turn."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.engine import prompt_cache
from edge_spec.engine.prompt_cache import KeptState, PromptCache

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
