"""Several conversations in one pass: on the real runtimes, bit for bit what each is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.runtime_protocols import PassPart, SharesPasses
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.errors import ContextFullError
from edge_spec.exporters.onnx import attention
from edge_spec.exporters.onnx.export import OnnxExporter
from edge_spec.loader import load_engine
from edge_spec.models.bundle import open_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.testing import check_sharing

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
    monkeypatch.setattr(attention, "_MIN_KV_SIZE", 1)
    OnnxExporter().export(
        checkpoint(variant), tmp_path / "out", ExportOptions("fp32"), lambda what, fraction: None
    )
    model = OrtModel(open_bundle(tmp_path / "out"), RuntimeOptions(threads=1))
    assert check_sharing(model, 1e-3) <= 1e-3
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
        batch = engine.parts.batch
        model = engine.parts.model
        assert isinstance(model, SharesPasses)
        alone = [engine.generate(each, max_tokens=24, **sampling).text for each in QUESTIONS]
        batch.prepare_for(len(QUESTIONS))
        batch.settle()
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
