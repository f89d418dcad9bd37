"""Several conversations in one pass: on the real runtimes, bit for bit what each is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.shared_pass import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.engine.shared_passes import SharedPasses
from edge_spec.errors import ContextFullError
from edge_spec.exporters.onnx import stacked
from edge_spec.exporters.onnx.export import OnnxExporter
from edge_spec.loader import load_engine
from edge_spec.models.bundle import open_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes import kv_cache
from edge_spec.runtimes.ort import joint
from edge_spec.runtimes.ort.joint import PLACES
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.testing import ScriptedModel, check_sharing, random_logits

pytest.importorskip("onnxruntime")

MODULES = {"llamacpp": "llama_cpp"}
QUESTIONS = ["one two three four five", "the cat sat on the mat and", "a b a b a b", "x"]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_onnxruntime_scores_rows_alike_whoever_shares_the_pass(
    exported: Callable[..., Any], variant: str
) -> None:
    model = OrtModel(exported(variant), RuntimeOptions(threads=1))
    # float32 on AVX-512, AVX2 and NEON: products of other widths may sum in another order.
    assert check_sharing(model, 1e-3) <= 1e-3
    model.close()


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_heads_that_are_stacked_as_rows_share_passes(
    checkpoint: Callable[..., Any],
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in models with large keys."""
    monkeypatch.setattr(stacked, "_MIN_KV_SIZE", 1)
    OnnxExporter().export(
        checkpoint(variant), tmp_path / "out", ExportOptions("fp32"), lambda what, fraction: None
    )
    model = OrtModel(open_bundle(tmp_path / "out"), RuntimeOptions(threads=1))
    assert check_sharing(model, 1e-3) <= 1e-3
    model.close()


def test_the_exact_model_shares() -> None:
    assert check_sharing(ScriptedModel(random_logits(50), 50), 0.0) == 0.0


def test_a_cache_that_grows_or_closes_is_bound_anew(exported: Callable[..., Any]) -> None:
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1))
    model.prepare_sharing(2)
    rng = np.random.default_rng(0)
    shared, own, other = (model.open_session() for _ in range(3))
    prompt = rng.integers(0, 100, model.config.context_length // 2).tolist()
    for session in (shared, own):
        session.prefill(prompt)
    for _ in range(3):
        tree = TokenTree.chain(1, [2, 3])
        other = model.open_session()
        parts = [PassPart(shared, tree), PassPart(other, TokenTree.chain(5))]
        first, _ = model.forward_together(parts, 4)
        np.testing.assert_allclose(first.logits, own.forward(tree).logits, atol=1e-3)
        for session in (shared, own):
            session.commit(range(3))
            state = session.state()
            session.restore(state, session.length)  # which may move it
        other.close()
    model.close()


def test_the_room_of_a_long_text_is_given_back_when_a_short_one_takes_its_place(
    exported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "GROWTH_TOKENS", 4)
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1))
    model.prepare_sharing(2)
    used, fresh, other = (model.open_session() for _ in range(3))
    tree = TokenTree.chain(5, [6, 7])
    used.prefill([1, 2, 3, 4] * 12)
    other.prefill([8, 9])
    parts = [PassPart(used, tree), PassPart(other, tree)]
    model.forward_together(parts, 6)  # which binds its buffers
    used.commit([0])
    before = used._cache.capacity
    used.rollback(4)
    assert used._cache.capacity < before / 2
    fresh.prefill([1, 2, 3, 4])
    expected = fresh.forward(tree).logits
    np.testing.assert_allclose(used.forward(tree).logits, expected, atol=1e-3)
    np.testing.assert_allclose(model.forward_together(parts, 6)[0].logits, expected, atol=1e-3)
    model.close()


def test_a_part_that_does_not_fit_leaves_all_as_they_were(exported: Callable[..., Any]) -> None:
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1, context_length=32))
    model.prepare_sharing(2)
    full, other = model.open_session(), model.open_session()
    full.prefill([1] * 31)
    other.prefill([2] * 4)
    tree = TokenTree.chain(3, [4])
    with pytest.raises(ContextFullError):
        model.forward_together([PassPart(other, tree), PassPart(full, tree)], 4)
    with pytest.raises(ValueError, match="gone"):
        other.commit([0])
    assert other.forward(tree).logits.shape[0] == 2
    model.close()


def test_more_sessions_than_one_graph_has_places_for_take_a_larger_one(
    exported: Callable[..., Any],
) -> None:
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1))
    assert model.prepare_sharing(2) == PLACES[0]
    assert model.prepare_sharing(3) == PLACES[1]
    sessions = [model.open_session() for _ in range(3)]
    outs = model.forward_together([PassPart(each, TokenTree.chain(1)) for each in sessions], 3)
    assert all(np.array_equal(out.logits, outs[0].logits) for out in outs)
    model.close()


def score_together(model: OrtModel, sessions: list[Any], times: int) -> np.ndarray:
    """Returns the scores of the first one's last row."""
    assert model._joint is not None
    for _ in range(times):
        parts = [PassPart(each, TokenTree.chain(1)) for each in sessions]
        found = model.forward_together(parts, len(parts))[0].logits
        model._joint.settle()
    return found


def test_a_smaller_graph_is_there_only_while_few_share_passes(exported: Callable[..., Any]) -> None:
    """Each has a copy of the weights; what rows score is the same in all."""
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1))
    sessions = [model.open_session() for _ in range(5)]
    model.prepare_sharing(2)
    assert model.prepare_sharing(5) == PLACES[2]
    assert model._joint is not None and list(model._joint._opened) == [PLACES[2]]
    few = score_together(model, sessions[:2], 1)
    assert np.array_equal(score_together(model, sessions[:2], 100), few)
    assert sorted(model._joint._opened) == [PLACES[0], PLACES[2]]
    score_together(model, sessions, 200)
    assert list(model._joint._opened) == [PLACES[2]]
    model.close()


def test_a_large_model_has_one_more_copy_of_its_weights_at_most(
    exported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "_LARGE_BYTES", 1)
    model = OrtModel(exported("llama"), RuntimeOptions(threads=1))
    assert model.prepare_sharing(2) == PLACES[0]
    assert model.prepare_sharing(3) == PLACES[1]
    assert model._joint is not None and list(model._joint._opened) == [PLACES[1]]
    sessions = [model.open_session() for _ in range(2)]
    score_together(model, sessions, 100)  # few share passes for a while
    assert list(model._joint._opened) == [PLACES[1]]
    monkeypatch.setattr(joint, "free_bytes", lambda: 1)  # a machine whose memory is used up
    assert model.prepare_sharing(8) == PLACES[1]
    assert OrtModel(exported("llama"), RuntimeOptions(threads=1)).prepare_sharing(2) == 1
    model.close()


@pytest.fixture
def opened(hf: Callable[..., Path]) -> Callable[..., Engine]:
    def load(runtime: str, **options: Any) -> Engine:
        asked = LoadOptions(runtime=runtime, threads=1, **options)
        return load_engine(str(hf()), asked, lambda what, fraction: None)

    return load


@pytest.mark.parametrize("runtime", ["reference", "ort", "llamacpp"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"sampling": SamplingParams(temperature=0.9, seed=5)}],
    ids=["greedy", "sampled"],
)
def test_a_text_does_not_depend_on_who_else_is_served(
    opened: Callable[..., Engine], runtime: str, sampling: dict[str, Any]
) -> None:
    if runtime in MODULES:
        pytest.importorskip(MODULES[runtime])
    with opened(runtime, drafter="suffix") as engine:
        passes = engine.parts.passes
        assert isinstance(passes, SharedPasses)
        model = engine.parts.model
        assert isinstance(model, SharesPasses)
        alone = [engine.generate(each, max_tokens=24, **sampling).text for each in QUESTIONS]
        passes.prepare_for(len(QUESTIONS))
        passes.settle()
        engines = [engine, *(engine.fork() for _ in QUESTIONS[1:])]
        for _ in range(3):
            together = answers_of(engines, sampling)
            assert together == alone
        for each in engines[1:]:
            each.close()


def answers_of(engines: list[Engine], sampling: dict[str, Any]) -> list[str]:
    found: dict[int, str] = {}

    def answer(at: int) -> None:
        found[at] = engines[at].generate(QUESTIONS[at], max_tokens=24, **sampling).text

    threads = [Thread(target=answer, args=(at,)) for at in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(engines))]
