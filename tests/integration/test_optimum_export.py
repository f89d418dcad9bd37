"""Tiny random models of other architectures through optimum, against transformers.

Needs the extra `optimum`; a model takes some ten seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.errors import EdgeSpecError, ExportError
from edge_spec.exporters import optimum as export
from edge_spec.exporters.optimum import OptimumExporter
from edge_spec.loader import load_engine
from edge_spec.models.bundle import open_bundle
from edge_spec.models.options import LoadOptions

# transformers and torch warn of each other, and of much that a trace depends on.
pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("optimum.exporters.onnx", exc_type=ImportError)
NUM_TOKENS = 24


class Published(NamedTuple):
    path: Path  # a Hugging Face directory
    model: Any  # what transformers made of it


@pytest.fixture(scope="module")
def published(
    others: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Published]:
    """published(name): one of other_models.CONFIGS."""

    @cache
    def write(name: str) -> Published:
        path = tmp_path_factory.mktemp("published") / name
        return Published(path, others.write(name, path, tiny))

    return write


def exported(path: Path, out: Path, **options: Any) -> ExportReport:
    exporter = OptimumExporter()
    source = exporter.open_source(path)
    return exporter.export(source, out, ExportOptions(**options), lambda what, done: None)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "opt", "phi"])
def test_the_text_is_that_of_transformers(
    name: str,
    published: Callable[[str], Published],
    tokens: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    path, model = published(name)
    report = exported(path, tmp_path / "bundle", quantization="fp32")
    assert report.notes == ()
    assert report.parity["max_logit_difference"] < 1e-4
    prompt = tokens(20)  # longer than gemma3_text's window
    expected = greedy(model, prompt)
    end = model.config.eos_token_id
    expected = expected[: expected.index(end) + 1] if end in expected else expected
    for drafter in ("auto", "none"):
        options = LoadOptions(runtime="ort", drafter=drafter)
        with load_engine(str(tmp_path / "bundle"), options, lambda what, done: None) as engine:
            result = engine.generate(prompt, max_tokens=NUM_TOKENS)
        assert [token.id for token in result.tokens] == expected


@pytest.mark.parametrize(("name", "quantization"), [("gpt2", "int4"), ("phi", "int8")])
def test_matrices_are_packed(
    name: str, quantization: str, published: Callable[[str], Published], tmp_path: Path
) -> None:
    report = exported(published(name).path, tmp_path / "bundle", quantization=quantization)
    assert report.notes == ()
    assert open_bundle(tmp_path / "bundle").manifest.quantization == f"{quantization} block 32"
    graph = (tmp_path / "bundle" / "model.onnx").read_bytes()
    bits = {int(found) for found in re.findall(rb"_Q([48])\b", graph)}
    assert bits == ({4, 8} if quantization == "int4" else {8})  # the head has 8
    low, high = (1e-4, 0.5) if quantization == "int4" else (1e-7, 0.02)
    assert low < report.parity["kl_divergence"] < high


def test_blocks_that_are_too_far_off_are_refused(
    published: Callable[[str], Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = dict(export.QUANTIZATIONS) | {"int4": export.BlockQuantization(4, 1e-9)}
    monkeypatch.setattr(export, "QUANTIZATIONS", MappingProxyType(strict))
    with pytest.raises(ExportError, match=r"KL divergence .*allowed 1e-09\. .*--quant int8"):
        exported(published("gpt2").path, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_scores_otherwise_is_refused(
    published: Callable[[str], Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(path: Path, **options: Any) -> np.ndarray:
        return np.roll(real(path, **options), 1, axis=1)

    real = np.load
    monkeypatch.setattr(export.np, "load", others)
    with pytest.raises(ExportError, match="too far from"):
        exported(published("gpt2").path, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_type", ["bert", "mamba"])
def test_architectures_that_optimum_does_not_export_are_refused(
    model_type: str, published: Callable[[str], Published], tmp_path: Path
) -> None:
    path, word = published("gpt2").path, "optimum cannot export"
    refusal(path, tmp_path, ExportError, word, model_type=model_type)


def refusal(
    path: Path, directory: Path, kind: type[EdgeSpecError], word: str, **values: Any
) -> None:
    """Of the model with other values in its config.json."""
    changed = directory / "changed"
    changed.mkdir()
    for file in path.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text()) | values
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind) as caught:
        exported(changed, directory / "bundle")
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert [file.name for file in directory.iterdir()] == ["changed"]
