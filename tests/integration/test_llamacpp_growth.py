"""A llama.cpp cache grows while it is used; a growth that fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel, cache
from edge_spec.runtimes.reference import ReferenceModel

Files = Callable[..., Path]
Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]
OpenLlama = Callable[..., LlamaCppModel]

# Half-precision keys and values, beside float32 ones; a wrong cache makes 1 to 10.
TOLERANCE = 0.3


def scored(one: Any, tree: TokenTree) -> np.ndarray:
    logits: np.ndarray = one.forward(tree).logits.copy()
    return logits


@pytest.mark.parametrize("first", [1, 8, 30])
def test_a_cache_grows_without_changing_the_scores(
    first: int,
    llama: str,
    gguf: Files,
    open_llama: OpenLlama,
    tokens: Tokens,
    random_tree: RandomTree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a prefill, after another one, a chain and a tree; after a branch was kept; with rows
    uncommitted."""
    monkeypatch.setattr(cache, "FIRST_TOKENS", first)
    grown = open_llama(llama, gguf("qwen3")).open_session()
    expected = ReferenceModel(runtimes.open_checkpoint(gguf("qwen3"))).open_session()
    sizes = [grown._sequence.home.choices.num_tokens]
    random: Any = np.random.RandomState(first)
    round = 0
    while grown.length + 24 <= 128:
        tree = random_tree(random.randint(2, 24), 100 * first + round)
        tree = tree if round % 3 else TokenTree.chain(1, tree.tokens.tolist())
        np.testing.assert_allclose(
            scored(grown, tree), scored(expected, tree), atol=TOLERANCE, rtol=0
        )
        if round % 4 != 3:
            path = tree.path(random.randint(len(tree)))
            grown.commit(path)
            expected.commit(path)
        else:
            for more in (tokens(5, round), tokens(6, round)):
                grown.prefill(more)
                expected.prefill(more)
                assert grown.length <= grown._sequence.home.choices.num_tokens
        assert grown.length == expected.length
        sizes.append(grown._sequence.home.choices.num_tokens)
        round += 1
    assert sizes == sorted(sizes)
    assert first == sizes[0] < sizes[-1] <= 128
    assert len(set(sizes)) <= 8  # it doubles


def test_a_growth_that_fails_leaves_the_cache_as_it_was(
    llama: str,
    gguf: Files,
    open_llama: OpenLlama,
    tokens: Tokens,
    random_tree: RandomTree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "FIRST_TOKENS", 32)
    one = open_llama(llama, gguf()).open_session()
    one.prefill(tokens(20))
    probe, library = random_tree(8), one._weights.library
    before = scored(one, probe)
    failing = library.replacing(open_context=lambda model, choices: None)
    for broken in (failing, library.replacing(llama_state_seq_set_data_ext=lambda *arguments: 0)):
        one._weights.library = broken
        with pytest.raises(EdgeSpecError) as caught:
            one.prefill(tokens(60))
        assert "\n" not in str(caught.value)
        assert one.length == 20
        one._weights.library = library
        np.testing.assert_array_equal(scored(one, probe), before)
    one.prefill(tokens(60))
    assert one.length == 80
