"""How llama.cpp and its fork compute attention on the CPU, and what that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp import LlamaCppModel

OpenLlama = Callable[..., LlamaCppModel]

LONG = 300  # tokens: from 257 on llama.cpp shares a single row out among its threads
# Matrices in float32 sum in another order for another number of rows, which changes a score by
# 5e-6; sums in float16, which the shares of a row are, change it by 1e-2.
ALIKE, APART = 1e-4, 1e-3
STEADY = "f16, single rows by the kernel of wider passes"


def first_rows(model: LlamaCppModel, tokens: Sequence[int]) -> np.ndarray:
    """[2, vocab]: the scores of one token, alone and before another one."""
    with closing(model.open_session()) as session:
        session.prefill(tokens[:LONG])
        rows = [
            session.forward(TokenTree.chain(tokens[LONG], others)).logits[0].copy()
            for others in ([], tokens[LONG + 1 : LONG + 2], [])
        ]
    assert np.array_equal(rows[0], rows[2])
    return np.array(rows[:2])


def change(model: LlamaCppModel, tokens: Sequence[int]) -> float:
    """The largest change of a score by the other row."""
    alone, beside = first_rows(model, tokens)
    return float(np.abs(alone - beside).max())


@pytest.fixture(scope="module")
def path(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", max_position_embeddings=512)
    return Path(tiny.write_gguf(model, tmp_path_factory.mktemp("ways") / "tiny.gguf", "F32"))


@pytest.fixture
def llamacpp(path: Path, open_llama: OpenLlama) -> LlamaCppModel:
    return open_llama("llamacpp", path, threads=2)


def test_single_rows_are_those_of_wider_passes_where_that_is_chosen(
    llamacpp: LlamaCppModel,
) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, llamacpp.config.vocab_size, LONG + 2).tolist()
    changes = {}
    for way in llamacpp.ways:
        llamacpp.choose_way(way)
        changes[way] = change(llamacpp, tokens)
    assert changes["f16"] > APART
    assert max(changes[STEADY], changes["f16-bf16"]) < ALIKE


def test_the_number_of_threads_changes_no_score(path: Path, open_llama: OpenLlama) -> None:
    found = []
    for threads in (1, 2):
        model = open_llama("llamacpp", path, threads=threads)
        model.choose_way(STEADY)
        drawn = np.random.default_rng(1).integers(0, model.config.vocab_size, LONG + 2)
        found.append(first_rows(model, drawn.tolist()))
        model.close()
    assert np.array_equal(found[0], found[1])
