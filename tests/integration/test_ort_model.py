"""Opening bundles in onnxruntime: options, devices, damaged files; and its measured numerics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import BundleError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models.bundle import MANIFEST, Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.scheduler.batch_invariance import MARGIN_WIDTHS, measure_batch_invariance
from edge_spec.storage.atomic import sha256_file
from fixtures import tolerance

Exported = Callable[..., Bundle]


@pytest.fixture
def copy(exported: Exported, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(exported("llama", "fp32").path, tmp_path / "bundle"))


def renew_manifest(directory: Path) -> None:
    """As if the damage had been there when the bundle was written."""
    manifest = json.loads((directory / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        file = directory / name
        entry |= {"sha256": sha256_file(file), "num_bytes": file.stat().st_size}
    (directory / MANIFEST).write_text(json.dumps(manifest))


def refusal(directory: Path, file: str) -> str:
    with pytest.raises(BundleError) as caught:
        OrtRuntime().open(open_bundle(directory), RuntimeOptions())
    text = str(caught.value)
    assert file in text
    assert "\n" not in text
    assert len(text) < 500
    assert caught.value.remedy
    return text


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_file_that_is_changed_cut_short_or_gone_is_noticed(file: str, copy: Path) -> None:
    data = (copy / file).read_bytes()
    middle = len(data) // 2
    (copy / file).write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert "sha256" in refusal(copy, file)
    (copy / file).write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes, expected {len(data)}" in refusal(copy, file)
    (copy / file).unlink()
    assert "is missing" in refusal(copy, file)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.onnx", lambda data: b""),
        ("model.onnx", lambda data: b"not a model" * 50),
        ("model.onnx", lambda data: data[: len(data) // 2]),
        ("model.onnx.data", lambda data: data[: len(data) // 2]),
    ],
    ids=["empty", "no graph", "half a graph", "half the weights"],
)
def test_a_bundle_written_damaged_is_refused_in_one_line(
    file: str, damage: Callable[[bytes], bytes], copy: Path
) -> None:
    (copy / file).write_bytes(damage((copy / file).read_bytes()))
    renew_manifest(copy)
    assert "cannot load" in refusal(copy, "model.onnx")


@pytest.mark.parametrize(
    "said",
    [
        {"num_layers": 10_000},
        {"num_layers": 1},
        {"num_kv_heads": 4096},
        {"head_dim": 4096},
        {"vocab_size": 4_000_000},
        {"hidden_size": 1 << 20},
    ],
    ids=str,
)
def test_a_graph_that_is_not_as_the_manifest_says_is_refused(
    said: dict[str, int], copy: Path
) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["architecture"] |= said
    (copy / MANIFEST).write_text(json.dumps(manifest))
    refusal(copy, "manifest")


def test_float_rows_hardly_depend_on_the_width(
    exported: Exported, checkpoint: Callable[..., StoredCheckpoint]
) -> None:
    """By the order of float32 sums only, in each of the two logits of a margin."""
    for model in (
        OrtRuntime().open(exported("llama", "fp32"), RuntimeOptions(threads=1)),
        ReferenceModel(checkpoint("llama")),
    ):
        batch_invariance = measure_batch_invariance(model)
        bound = 2 * tolerance.float32_tolerance(model.config, positions=32, magnitude=10)
        assert 0 <= batch_invariance.tie_margin < bound
        assert max(MARGIN_WIDTHS) in batch_invariance.invariant_widths  # compared with itself
        assert measure_batch_invariance(model) == batch_invariance
