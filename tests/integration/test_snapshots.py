"""Conversations that are put away by one engine and taken up by another, on the real runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Restorable
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.errors import SnapshotError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp.transfer import CELL_WORDS, WORDS_BEFORE
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures import axes

RUNTIMES: dict[str, dict[str, Any]] = {
    "reference": {},
    "ort": {"quantization": "fp32"},
    "llamacpp": {"quantization": "F32"},
}
DRAFTERS = ["none", "suffix", "recycling", "answers", "draft-model", "cascade"]
SAMPLING = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=11)}
PROMPT = [70, 84, 72, 70, 84, 72, 70, 84, 75]
Two = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=RUNTIMES)
def two(
    request: pytest.FixtureRequest, hf: Callable[..., Path], tmp_path_factory: Any
) -> Iterator[Two]:
    """Engines of their own on the same tiny model, with another one as its draft."""

    def opened() -> Engine:
        return load_engine(str(hf()), options, lambda what, fraction: None)

    options = LoadOptions(
        runtime=request.param,
        draft=(str(hf("llama-tied")),),
        draft_runtime=request.param,
        threads=1,
        **RUNTIMES[request.param],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("snapshots")))
        with opened() as engine, opened() as other:
            yield engine, other


def draft_by(engine: Engine, drafters: str) -> None:
    """What is drafted then does not depend on how long anything took."""
    engine.set_drafter(drafters)
    engine._drafting.take()
    engine._drafting.speculation = replace(
        engine._drafting.speculation, policy=FixedPolicy(5, min_confidence=0.01, branches=False)
    )


@pytest.mark.parametrize(("drafters", "sampling"), axes.each(DRAFTERS, list(SAMPLING)))
def test_a_conversation_goes_on_in_another_engine(
    two: Two, tmp_path: Path, drafters: str, sampling: str
) -> None:
    engine, other = two
    for each in two:
        draft_by(each, drafters)
    other.generate(PROMPT[::-1], max_tokens=5)
    options = {"max_tokens": 20, "sampling": SAMPLING[sampling]}
    prompt = PROMPT + [token.id for token in engine.generate(PROMPT, **options).tokens]
    engine.snapshot(tmp_path / "chat")
    other.restore(tmp_path / "chat")
    prompt += PROMPT[:3]
    expected, found = (each.generate(prompt, **options) for each in two)
    assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
    if drafters != "answers":  # which are in a file of their own
        assert found.tokens == expected.tokens  # with their origins: drafters drafted alike
    assert found.stats.cached_n == expected.stats.cached_n == len(prompt) - len(PROMPT[:3]) - 1
    assert found.stats.draft_n > 0 or drafters in ("none", "answers", "suffix")


def test_the_restored_cache_gives_the_same_logits_bit_for_bit(two: Two, tmp_path: Path) -> None:
    engine, other = two
    for each in two:
        draft_by(each, "draft-model")
    engine.generate(PROMPT, max_tokens=30)
    engine.snapshot(tmp_path / "chat")
    other.restore(tmp_path / "chat")
    chain = TokenTree.chain(PROMPT[0], PROMPT[1:6])
    first, second = (each._session.forward(chain).logits.copy() for each in two)
    assert np.array_equal(first, second)
    one, another = (each._session for each in two)
    assert isinstance(one, Restorable) and isinstance(another, Restorable)
    states = one.state(), another.state()
    assert states[0].keys() == states[1].keys() != set()
    for name, array in states[0].items():
        assert np.array_equal(array, states[1][name])


def test_another_runtime_reads_the_text_again(
    hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))

    def opened(runtime: str, variant: str = "llama", **options: Any) -> Engine:
        options |= {"runtime": runtime, "drafter": "none", "threads": 1, **RUNTIMES[runtime]}
        return load_engine(str(hf(variant)), LoadOptions(**options), lambda what, fraction: None)

    with opened("ort") as engine:
        prompt = PROMPT + [token.id for token in engine.generate(PROMPT, max_tokens=9).tokens]
        engine.snapshot(tmp_path / "chat", {"of": "ort"})
        expected = engine.generate(prompt, max_tokens=9)
    for runtime, options in (("reference", {}), ("ort", {"exact": True})):
        with opened(runtime, **options) as other:
            assert other.restore(tmp_path / "chat") == {"of": "ort"}
            found = other.generate(prompt, max_tokens=9)
            assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
            assert found.stats.cached_n == len(prompt) - 1
    with opened("ort", "llama-bias") as other, pytest.raises(SnapshotError, match="was made with"):
        other.restore(tmp_path / "chat")


def test_no_length_or_position_that_is_wrong_reaches_the_library(
    gguf: Callable[..., Path], open_llama: Callable[..., Any]
) -> None:
    """Which could read as many cells as it is told, beyond its memory."""
    model = open_llama("llamacpp", gguf("llama"))
    session, other = model.open_session(), model.open_session()
    session.prefill(list(range(20)))
    other.prefill(PROMPT)
    sequence = session.state()["sequence"]
    before = other.state()["sequence"]
    first, width = WORDS_BEFORE + 2, CELL_WORDS
    words = first + 20 * width
    for at in range(4 * (first - 1), 4 * words):
        if at // 4 >= first and (at // 4 - first) % width == width - 1:
            continue  # the sequence's number there, which the library does not use
        for flipped in (1, 255):
            damaged = sequence.copy()
            damaged[at] ^= flipped
            with pytest.raises(ValueError, match="no sequence of 20 tokens"):
                other.restore({"sequence": damaged}, 20)
    for size in (0, 1, 4 * words - 1, 4 * words, len(sequence) - 1):
        with pytest.raises(ValueError):
            other.restore({"sequence": sequence[:size]}, 20)
    assert np.array_equal(other.state()["sequence"], before) and other.length == len(PROMPT)
    other.restore({"sequence": sequence}, 20)
    assert other.length == 20
