"""Whatever fails on a real runtime, texts are right; on tiny models of random weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Interruptible
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.kv_cache import KvCache
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.fault_matrix import check_faults

OPTIONS: dict[str, dict[str, Any]] = {
    "ort": {"quantization": "fp32", "drafter": "cascade,early-exit", "exit_layer": 1},
    "llamacpp": {"quantization": "F32", "kv_type": "f32", "flash_attention": False},
}
DRAFTERS = {"ort": ["early-exit", "draft-model"], "llamacpp": ["cascade"]}
Opened = Callable[[str], Any]


@pytest.fixture(scope="module")
def opened(
    hf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """opened(runtime): an engine with the same model as its draft."""
    cache = tmp_path_factory.mktemp("faults")

    def open_engine(runtime: str) -> Any:
        options = LoadOptions(
            runtime=runtime,
            draft=(str(hf()),),
            draft_runtime=runtime,
            threads=1,
            draft_threads=1,
            **OPTIONS[runtime],
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CACHE_VARIABLE, str(cache))
            return load_engine(str(hf()), options, lambda what, fraction: None)

    return open_engine


@pytest.mark.parametrize("runtime", ["ort", pytest.param("llamacpp", marks=pytest.mark.slow)])
def test_an_engine_survives_every_fault(opened: Opened, runtime: str) -> None:
    with opened(runtime) as engine:
        prompts = [[5, 9, 5, 9, 7], [20, 21, 20, 21]]
        report = check_faults(engine.parts, prompts, DRAFTERS[runtime], steps=[2], max_tokens=8)
    assert [str(case) for case in report.cases if case.lost is not None] == []
    parts = {case.part for case in report.cases}
    own = {"early-exit", "draft-model", "part"} if runtime == "ort" else {"cascade"}
    assert parts == {"draft", "target", *own}
    assert report.by_kind()["hangs"]["injected"]


@pytest.fixture
def session(opened: Opened) -> Any:
    with opened("ort") as engine, closing(engine.parts.model.open_session()) as session:
        yield session


def test_a_cache_that_cannot_grow_stays_as_it_was(session: Any, monkeypatch: Any) -> None:
    session.prefill([5, 9, 7])
    tree = TokenTree.chain(3, [4])
    before = session.forward(tree).logits.copy()

    def no_memory(cache: KvCache, capacity: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(KvCache, "_allocate", no_memory)
    monkeypatch.setattr("edge_spec.runtimes.kv_cache.GROWTH_TOKENS", 4)
    capacity = session.cache.capacity
    with pytest.raises(MemoryError):
        session.cache.reserve(capacity + 1, 3)
    assert session.cache.capacity == capacity == session.cache._blocks["kv"].shape[-2]
    monkeypatch.undo()
    assert (session.forward(tree).logits == before).all()


def test_an_interrupted_session_scores_nothing_more_and_others_go_on(opened: Opened) -> None:
    with opened("ort") as engine:
        first, other = engine.parts.model.open_session(), engine.parts.model.open_session()
        assert isinstance(first, Interruptible)
        for session in (first, other):
            session.prefill([5, 9, 7])
        first.interrupt()
        with pytest.raises(SessionError):
            first.forward(TokenTree.chain(3))
        assert np.isfinite(other.forward(TokenTree.chain(3)).logits).all()
        first.close()
        other.close()
