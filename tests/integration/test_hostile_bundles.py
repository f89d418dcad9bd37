"""Bundles whose parts lead elsewhere: nothing outside of a bundle is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import BundleError, ModelFileError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import MANIFEST, Bundle, is_below, open_bundle, write_manifest
from edge_spec.models.model_text import text_of_bundle
from edge_spec.runtimes.coreml.native import package_of
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.testing import ScriptedModel, random_logits
from edge_spec.text.tokenizer import Tokenizer

CONFIG = replace(ScriptedModel(random_logits(5), 5).config, context_length=8)
WEIGHTS = np.arange(4, dtype=np.float32)
FIELDS: dict[str, Any] = {
    "name": "tiny",
    "architecture": CONFIG.to_dict(),
    "chat_template": None,
    "eos_ids": (1,),
    "bos_id": None,
    "adds_bos": False,
    "quantization": "none",
    "source_sha256": None,
    "parity": {},
}


@pytest.mark.parametrize(
    "name",
    [
        *("/a", "a/../../b", "..", "a//b", "./a", "C:a", "C:/a", "a\\b", "\\\\host\\share", "a\0b"),
        *("a\nb", "con", "a/NUL", "aux.txt", "com1.onnx", "lpt\u00b9", "a.", "a ", "..."),
    ],
)
def test_a_name_that_a_system_reads_otherwise_is_refused(name: str) -> None:
    assert not is_below(name)


def test_names_that_only_look_like_it_are_not() -> None:
    for name in ("a", ".a", "a.b/c..d", "console", "a/model.onnx.data", "com10", "caf\u00e9 1"):
        assert is_below(name), name


def onnx_bundle(folder: Path, location: str) -> Bundle:
    """A graph whose only weights are where `location` says."""
    weights = TensorProto(
        name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    node = helper.make_node("Identity", ["w"], ["y"])
    graph = helper.make_graph([node], "g", [], [output], [weights])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "tokenizer.json").write_text("{}")
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder, format="onnx", **FIELDS)
    return open_bundle(folder)


@pytest.mark.parametrize("location", ["../w", "{outside}/w", "link", "folder/w"])
def test_onnxruntime_reads_no_weights_from_outside(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (tmp_path / "w").write_bytes(WEIGHTS.tobytes())
    (folder / "own").write_bytes(WEIGHTS.tobytes())
    with pytest.raises(BundleError, match="its graph is not"):  # no model, but it was loaded
        OrtRuntime().open(onnx_bundle(folder, "own"), RuntimeOptions(threads=1))
    bundle = onnx_bundle(folder, location.format(outside=tmp_path))
    (folder / "link").symlink_to(tmp_path / "w")
    (folder / "folder").symlink_to(tmp_path)
    with pytest.raises(BundleError, match="onnxruntime cannot load"):
        OrtRuntime().open(bundle, RuntimeOptions(threads=1))


@pytest.mark.parametrize(
    "listed",
    [
        {"a": {"path": "../../../secret"}},
        {"a": {"path": "/etc/passwd"}},
        {"a": {"path": "com.apple.CoreML/other.mlmodel"}},
        {"a": {}},
        ["a"],
        None,
    ],
    ids=str,
)
def test_a_package_that_names_a_file_outside_is_refused(listed: Any, tmp_path: Path) -> None:
    content = tmp_path / "model.mlpackage" / "Data" / "com.apple.CoreML"
    content.mkdir(parents=True)
    (content / "model.mlmodel").write_bytes(b"")
    (content / "weights").mkdir()
    (content / "weights" / "weight.bin").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    right = {"a": {"path": "com.apple.CoreML/model.mlmodel"}}
    right["b"] = {"path": "com.apple.CoreML/weights"}
    for entries in (right, listed):
        manifest = tmp_path / "model.mlpackage" / "Manifest.json"
        manifest.write_text(json.dumps({"itemInfoEntries": entries}))
        (tmp_path / MANIFEST).unlink(missing_ok=True)
        write_manifest(tmp_path, format="coreml", **FIELDS)
        if entries is right:
            assert package_of(open_bundle(tmp_path)).name == "model.mlpackage"
    with pytest.raises(BundleError, match=r"model\.mlpackage"):
        package_of(open_bundle(tmp_path))


def test_a_file_of_a_directory_is_not_read_however_large_it_is(
    tiny: ModuleType, tmp_path: Path
) -> None:
    directory = tiny.write_hf(tiny.build(), tmp_path / "model")
    with (directory / "config.json").open("r+b") as file:
        file.truncate(200_000_000)  # takes no space
    with pytest.raises(ModelFileError, match="larger than 100 MB"):
        open_checkpoint(directory)


def test_a_tokenizer_of_a_bundle_is_not_read_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = onnx_bundle(tmp_path, "model.onnx.data")
    with bundle.file("tokenizer.json").open("r+b") as file:
        file.truncate(200_000_000)  # takes no space

    def read(self: Path, **options: Any) -> str:
        raise AssertionError("read")

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(ModelFileError, match="larger than 100 MB"):
        text_of_bundle(bundle)


def test_a_tokenizer_that_the_library_gives_up_is_refused() -> None:
    # Its Rust code cuts a prefix off that is longer than the token: found by fuzzing.
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    model["continuing_subword_prefix"] = "#####"
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be used"):
        Tokenizer(json.dumps({"version": "1.0", "model": model}))
