"""A model whose output matrix has rows of some tokens alone: their scores are as they were, bit for
bit, and all others read minus infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import ScoredTokens
from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp import LlamaCppModel, upstream

VOCAB = 265
CHOICES = {
    "the first ones": range(40),
    "one": [7],
    "the first and the last": [0, VOCAB - 1],
    "scattered": [*range(0, 16), *range(31, 80, 3), *range(100, 133), 200, VOCAB - 2],
    "all": range(VOCAB),
}
OpenLlama = Callable[..., LlamaCppModel]
Tokens = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def _has_kernels() -> None:
    pytest.importorskip("llama_cpp")
    rows = upstream.library().rows
    if rows is None or rows.table is None:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def path(request: pytest.FixtureRequest, tiny: Any, tmp_path: Path) -> Path:
    """A tied output matrix is that of embeddings, of which no row may be missing."""
    built = tiny.build("llama", tie_word_embeddings=request.param)
    return Path(tiny.write_gguf(built, tmp_path / "model.gguf", "Q8_0"))


def scored(model: LlamaCppModel, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits of passes of several widths, [rows, vocab]."""
    session = model.open_session()
    session.prefill(tokens[:20])
    found, at = [], 20
    for width in (1, 2, 9, 16):
        found.append(session.forward(TokenTree.chain(tokens[at], tokens[at + 1 : at + width])))
        found[-1] = found[-1].logits.copy()
        session.commit(range(width))
        at += width
    session.close()
    return np.concatenate(found)


@pytest.mark.parametrize("name", CHOICES)
def test_scores_of_wanted_tokens_are_as_they_were_and_others_minus_infinity(
    name: str, path: Path, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """Also with more threads than tiles, and where the file is read and not mapped."""
    text, wanted = tokens(60), list(CHOICES[name])
    whole = open_llama("llamacpp", path)
    expected = scored(whole, text)
    expected[:, np.setdiff1d(np.arange(VOCAB), wanted)] = -np.inf
    for options in ({"threads": 1}, {"threads": 4}, {"threads": 2, "mmap": False}):
        model = open_llama(
            "llamacpp", path, scored_tokens=ScoredTokens.of(reversed(wanted)), **options
        )
        assert f", {len(wanted)} tokens scored" in str(model.capabilities.kernels)
        np.testing.assert_array_equal(scored(model, text), expected)
        model.close()
    whole.close()


def test_the_next_load_of_the_file_has_all_of_its_tokens(
    path: Path, open_llama: OpenLlama, tokens: Tokens
) -> None:
    text = tokens(60)
    few = open_llama("llamacpp", path, scored_tokens=ScoredTokens.of([1, 2]))
    whole = open_llama("llamacpp", path)
    assert np.isfinite(scored(whole, text)).all()
    assert np.isfinite(scored(few, text)).sum(1).tolist() == [2] * 28
    assert whole.capabilities.kernels != few.capabilities.kernels
    few.close(), whole.close()
