"""ERNIE 4.5, which one file of exporters/families/ describes, in every format: its scores are those
of transformers, and drafts leave its text as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models import core_ai, runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.models.options import LoadOptions
from fixtures import families
from fixtures.silence import quiet
from fixtures.tolerance import float32_tolerance

NAME, CONTEXT = "ernie4_5", 96
# Format and unit: what its weights are stored as, and who runs it. float16 moves scores, whose
# standard deviation is 0.7, by 2e-3; a rotation of other pairs by 0.5 and more.
BACKENDS: dict[str, tuple[str, str | None, str, float]] = {
    "onnx": ("fp32", None, "ort", 0.0),
    "onnx-static": ("fp32", None, "ort", 0.0),
    "coreml": ("fp16", "gpu", "coreml", 0.02),
    "coreml-ane": ("fp16", "ane", "coreml", 0.02),
    "coreai": ("fp32", None, "coreai", 0.0),
    "gguf": ("F32", None, "llamacpp", 0.0),
}
MODULES = {"coreml": "coremltools", "coreai": "coreai", "llamacpp": "llama_cpp"}
OF_RUNTIME: dict[str, Any] = {"llamacpp": {"kv_type": "f32", "flash_attention": False}}


@pytest.fixture(scope="module", params=BACKENDS)
def written(
    request: pytest.FixtureRequest,
    family: Callable[[str], StoredCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str, float]]:
    """The model in this format, its runtime, and how far its scores may be off besides rounding."""
    quantization, compute, runtime, off = BACKENDS[request.param]
    format, folder = request.param.removesuffix("-ane"), tmp_path_factory.mktemp("backend")
    if runtime in MODULES:
        pytest.importorskip(MODULES[runtime])
    if format == "coreai" and (problem := core_ai.running_problem()) is not None:
        pytest.skip(problem)
    out = folder / ("model.gguf" if format == "gguf" else "bundle")
    length = None if format in ("onnx", "gguf") else CONTEXT
    asked = ExportOptions(quantization, None, False, compute, length)
    runtimes.load_exporter(format).export(family(NAME), out, asked, quiet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_SPEC_CACHE", str(folder / "cache"))
        if format == "coreml":
            from edge_spec.runtimes.coreml import CoreMlRuntime
            from fixtures.coreml_in_numpy import open_in_numpy

            open_it = lambda self, source, options: open_in_numpy(source, options)  # noqa: E731
            patch.setattr(CoreMlRuntime, "open", open_it)
            patch.setattr(CoreMlRuntime, "require_devices", lambda self, providers: None)
        yield out, runtime, off


def text_with(path: Path, runtime: str, drafter: str) -> list[int]:
    asked = LoadOptions(
        runtime=runtime, context_length=CONTEXT, drafter=drafter, **OF_RUNTIME.get(runtime, {})
    )
    with load_engine(str(path), asked, quiet) as engine, engine.verifying_all_draft_tokens():
        found = engine.generate([5, 9, 100, 33] * 3, max_tokens=12)
    assert drafter == "none" or found.stats.draft_n > 0
    return [token.id for token in found.tokens]


def test_scores_are_those_of_transformers(written: tuple[Path, str, float]) -> None:
    path, runtime, off = written
    source: Any = open_bundle(path) if path.is_dir() else runtimes.open_model_info(path)
    options = RuntimeOptions(context_length=CONTEXT, **OF_RUNTIME.get(runtime, {}))
    model: Model = runtimes.load_runtime(runtime).open(source, options)
    expected = families.load(NAME)
    rows = families.NUM_TOKENS - families.FIRST_SCORED
    text, session = expected.texts[0].tolist(), model.open_session()
    session.prefill(text[:-rows])
    found = []
    for first in range(len(text) - rows, len(text), 7):
        tree = TokenTree.chain(text[first], text[first + 1 : first + 7])
        found.append(session.forward(tree).logits.copy())
        session.commit(range(len(tree)))
    session.close()
    magnitude = float(np.abs(expected.logits).max())
    bound = float32_tolerance(model.config, families.NUM_TOKENS, magnitude) + off
    np.testing.assert_allclose(np.concatenate(found), expected.logits[:rows], atol=bound, rtol=0)
    model.close()


def test_drafts_leave_the_text_as_it_is(written: tuple[Path, str, float], tmp_path: Path) -> None:
    path, runtime, off = written
    plain = text_with(path, runtime, "none")
    assert text_with(path, runtime, "suffix") == plain
    if not off:
        assert text_with(families.write_hf(NAME, tmp_path / "hf"), "reference", "suffix") == plain


def test_biases_are_refused(tmp_path: Path) -> None:
    path = families.write_hf(NAME, tmp_path / "hf", use_bias=True)
    with pytest.raises(UnsupportedModelError, match="biases in its MLPs"):
        open_checkpoint(path)
