"""Pair bundles of tiny models: composed by the real exporters, opened by the real runtimes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.errors import (
    ExportError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import PairManifest, read_listing
from edge_spec.models.pair_export import (
    ExportChoices,
    PairPart,
    choices_for,
    export_pair,
    named_formats,
)
from edge_spec.models.source import Source
from edge_spec.storage.atomic import sha256_file
from fixtures.silence import quiet

BOTH = named_formats(["onnx", "gguf"])
UNCHECKED = ExportOptions(check=False)


def part(path: Path, num_layers: int | None = None) -> PairPart:
    return PairPart(Source(str(path), quiet), num_layers)


def contents(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256_file(path) for path in files}


def test_it_has_both_models_in_both_formats_and_says_how_far_they_are(exported_pair: Path) -> None:
    manifest = read_listing(exported_pair, PairManifest)
    assert set(contents(exported_pair)) == {"pair.json", *manifest.files}
    for name, entry in manifest.files.items():
        assert sha256_file(exported_pair / name) == entry.sha256
    for (role, member), num_layers in zip(manifest.members(), (2, 1), strict=True):
        assert member.num_layers == num_layers
        assert member.formats == ["onnx", "gguf"]
        assert member.variants[0].quantization == "int4 block 32"
        assert all(v.path.startswith(role) and "kl_divergence" in v.parity for v in member.variants)
    assert manifest.draft is not None and manifest.draft.name == "llama-1-layers"
    assert manifest.vocabulary is not None and manifest.vocabulary.num_shared == 265
    assert {"edge-spec", "onnx", "gguf"} <= set(manifest.versions)
    assert str(exported_pair.parent) not in (exported_pair / "pair.json").read_text()


@pytest.mark.parametrize(("existing", "after"), [(True, 1), (False, 9), (True, 15)])
def test_an_interrupt_leaves_out_as_it_was(
    existing: bool, after: int, exported_pair: Path, hf: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if existing:
        shutil.copytree(exported_pair, out)
    before, told = contents(tmp_path), 0

    def interrupt(what: str, fraction: float) -> None:
        nonlocal told
        told += 1
        if told == after:
            raise KeyboardInterrupt

    model = part(hf())
    with pytest.raises(KeyboardInterrupt):
        export_pair(model, replace(model, num_layers=1), BOTH, out, interrupt)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])


def test_a_pair_is_replaced_whole_and_other_directories_are_not(
    pair: Path, hf: Callable[..., Path], tmp_path: Path
) -> None:
    request = part(hf(), 1), None, named_formats(["gguf"]), pair, quiet, UNCHECKED
    export_pair(*request)
    assert set(contents(pair)) == {"pair.json", "tokenizer.json", "target/gguf/model.gguf"}
    (pair / "diary.txt").write_text("dear diary")
    before = contents(pair)
    with pytest.raises(UsageError, match="exists and is no pair bundle, or has more in it"):
        export_pair(*request)
    assert contents(pair) == before


def test_a_draft_with_other_tokens_is_refused_before_anything_is_written(
    hf: Callable[..., Path], tiny: ModuleType, tmp_path: Path
) -> None:
    other = tiny.write_hf(tiny.build(), tmp_path / "other")
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match="another vocabulary than llama: 2 of 265 tokens differ"):
        export_pair(part(hf()), part(other), BOTH, tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def without(monkeypatch: pytest.MonkeyPatch, format: str, error: Exception) -> None:
    """Its exporter is installed, and cannot write."""

    class Broken:
        def export(self, *arguments: object) -> None:
            raise error

    real = runtimes.load_exporter
    monkeypatch.setattr(
        runtimes, "load_exporter", lambda name: Broken() if name == format else real(name)
    )


def exported_for(kind: ExportChoices, model: Path, out: Path) -> PairManifest:
    return export_pair(part(model), part(model, 1), kind, out, quiet, UNCHECKED)


def test_a_format_that_was_named_is_written_or_nothing_is(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "coreml", UnsupportedModelError("a head of 7", remedy="Use another."))
    with pytest.raises(UnsupportedModelError, match="a head of 7"):
        exported_for(named_formats(["gguf", "coreml"]), hf(), tmp_path / "out")
    with pytest.raises(
        UsageError, match=r"no exporter called 'tflite'\..*Installed: coreai, coreml, gguf"
    ):
        exported_for(named_formats(["gguf", "tflite"]), hf(), tmp_path / "out")
    for format in ("onnx", "gguf"):
        without(monkeypatch, format, UnsupportedModelError("a head of 7", remedy="Use another."))
    with pytest.raises(ExportError, match=r"target could not be written for linux: .*a head of 7"):
        exported_for(choices_for("linux"), hf(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
