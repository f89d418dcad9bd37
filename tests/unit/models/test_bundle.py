"""Bundles: what was written opens; whatever is damaged is refused and named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import BundleError
from edge_spec.models.bundle import MANIFEST, is_bundle, open_bundle, write_manifest
from edge_spec.testing import ScriptedModel, random_logits

FILE = {"sha256": hashlib.sha256(b"weights").hexdigest(), "num_bytes": len(b"weights")}
CONFIG = ScriptedModel(random_logits(5), 5).config
FIELDS: dict[str, Any] = {
    "format": "onnx",
    "name": "tiny",
    "architecture": CONFIG.to_dict(),
    "chat_template": None,
    "eos_ids": (1, 2),
    "bos_id": None,
    "adds_bos": False,
    "quantization": "q4",
    "source_sha256": None,
    "parity": {"kl": 0.01},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(b"weights")
    (directory / "tokenizer.json").write_text("{}")
    write_manifest(directory, **FIELDS)
    return directory


def edit(directory: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((directory / MANIFEST).read_text())
    change(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest))


def refused(directory: Path, name: str) -> None:
    """Opening raises BundleError of one line that names the file and a remedy."""
    with pytest.raises(BundleError) as caught:
        open_bundle(directory)
    message = str(caught.value)
    assert name in message and "\n" not in message
    assert "export the model again" in message
    assert "validation error" not in message and "pydantic" not in message


def test_a_written_bundle_opens_with_all_it_says(directory: Path) -> None:
    assert is_bundle(directory)
    bundle = open_bundle(directory)
    assert bundle.config == CONFIG
    assert bundle.manifest.eos_ids == (1, 2) and bundle.manifest.parity == {"kl": 0.01}
    assert bundle.num_bytes == len(b"weights") + 2
    assert bundle.file("model.onnx").read_bytes() == b"weights"
    assert set(bundle.manifest.files) == {"model.onnx", "tokenizer.json"}
    assert bundle.manifest.tokenizer_sha256 == bundle.manifest.files["tokenizer.json"].sha256


def linked(directory: Path, outside: Path) -> None:
    (directory / "model.onnx").rename(outside / "model.onnx")
    (directory / "model.onnx").symlink_to(outside / "model.onnx")


def linked_folder(directory: Path, outside: Path) -> None:
    (outside / "model.onnx").write_bytes(b"weights")
    (directory / "sub").symlink_to(outside)
    edit(directory, lambda manifest: manifest["files"].update({"sub/model.onnx": FILE}))


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda directory, outside: (directory / "model.onnx").unlink(), "model.onnx"),
    "truncated": (lambda directory, outside: (directory / "model.onnx").write_bytes(b"w"), "bytes"),
    "changed": (
        lambda directory, outside: (directory / "model.onnx").write_bytes(b"Weights"),
        "model.onnx does not match the sha256",
    ),
    "a link": (linked, "model.onnx"),
    "a link to a folder": (linked_folder, "sub/model.onnx"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_is_listed_is_named(
    directory: Path, tmp_path_factory: Any, damage: str
) -> None:
    change, named = DAMAGES[damage]
    change(directory, tmp_path_factory.mktemp("outside"))
    refused(directory, named)


@pytest.mark.parametrize(
    "name",
    ["../model.onnx", "{outside}/model.onnx", "sub/../../model.onnx", "sub\\model.onnx", ".."],
)
def test_a_name_that_leads_out_of_the_bundle_is_refused(directory: Path, name: str) -> None:
    name = name.format(outside=directory.parent)
    (directory / "sub").mkdir()
    for place in (directory.parent, directory / "sub"):  # where the name leads, all is well
        (place / "model.onnx").write_bytes(b"weights")
    edit(directory, lambda manifest: manifest["files"].update({name: FILE}))
    refused(directory, name)


@pytest.mark.parametrize("name", [".", ""])
def test_a_name_that_is_no_file_is_refused(directory: Path, name: str) -> None:
    edit(directory, lambda manifest: manifest["files"].update({name: FILE}))
    refused(directory, f"outside itself: {name}".rstrip())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"[]", b"null", b"\xff\xfe{}", b'{"schema_version": 1', b"[" * 10_000],
    ids=lambda content: repr(content[:12]),
)
def test_a_manifest_that_is_no_json_object_is_refused(directory: Path, content: bytes) -> None:
    (directory / MANIFEST).write_bytes(content)
    refused(directory, MANIFEST)


def test_a_missing_manifest_is_refused(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    assert not is_bundle(directory)
    refused(directory, MANIFEST)


def test_a_huge_manifest_is_refused_unread(directory: Path) -> None:
    with (directory / MANIFEST).open("r+b") as file:
        file.truncate(16_000_001)
    refused(directory, MANIFEST)


FIELDS_OF_NONE: list[dict[str, Any]] = [
    {"schema_version": 2},
    {"schema_version": 0},
    {"surprise": 1},
    {"eos_ids": "two"},
    {"eos_ids": None},
    {"adds_bos": "perhaps"},
    {"files": {"model.onnx": {"sha256": "short", "num_bytes": 7}}},
    {"files": {"model.onnx": {"sha256": "0" * 64, "num_bytes": -1}}},
    {"files": {"model.onnx": {"sha256": "0" * 64, "num_bytes": 7, "url": "x"}}},
    {"architecture": {}},
    {"architecture": []},
    *({"quantization": f"int4 block {block}"} for block in ("0", "00", "65537", "9" * 5000)),
]
ARCHITECTURES_OF_NONE: list[dict[str, Any]] = [
    {"surprise": 1},
    {"rope_scaling": 5},
    {"rope_scaling": {"kind": "linear", "x": 1}},
    {"context_length": "many"},
    {"context_length": "512"},
    {"num_layers": None},
    {"hidden_size": 0},
    {"hidden_size": 10**400},
    {"vocab_size": 10**9},
    {"num_layers": -1},
    {"num_kv_heads": 0},
    {"head_dim": 2**40},
    {"intermediate_size": -1},
    {"num_experts": 10**9},
    {"num_experts": 4, "experts_used": 2, "experts": {"dense_layers": 10**9}},
    {"num_experts": 4, "experts_used": 2, "experts": {"dense_layers": 1, "dense_size": 0}},
    {"num_experts": 4, "experts_used": 2, "experts": {"scale": -1.0}},
    {"context_length": 0},
    {"context_length": 16_777_217},
    {"rope_theta": 10**400},
    {"rope_scaling": {"kind": "linear", "original_context_length": 10**400}},
]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        *((None, change) for change in FIELDS_OF_NONE),
        *(("architecture", change) for change in ARCHITECTURES_OF_NONE),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_field_that_no_bundle_has_is_refused(
    directory: Path, part: str | None, change: dict[str, Any]
) -> None:
    edit(directory, lambda manifest: (manifest[part] if part else manifest).update(change))
    refused(directory, MANIFEST)


@pytest.mark.parametrize("field", ["format", "files", "architecture", "eos_ids", "source_sha256"])
def test_a_missing_field_is_refused_by_name(directory: Path, field: str) -> None:
    edit(directory, lambda manifest: manifest.pop(field))
    refused(directory, field)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_manifest_without_end_is_refused(directory: Path, kind: str) -> None:
    (directory / MANIFEST).unlink()
    if kind == "device":
        (directory / MANIFEST).symlink_to("/dev/zero")
    else:
        os.mkfifo(directory / MANIFEST)
    refused(directory, MANIFEST)
