"""Pair bundles: what was written opens; a pair.json that lies is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import BundleError
from edge_spec.models.bundle import (
    PAIR_MANIFEST,
    FileEntry,
    Member,
    PairManifest,
    Variant,
    VocabularyProof,
    find_foreign,
    find_member,
    list_files,
    may_replace,
    read_listing,
    write_listing,
)
from edge_spec.models.source import Source
from edge_spec.storage.atomic import sha256_file
from fixtures.silence import quiet

DIGEST = "0" * 64
PROOF = VocabularyProof(
    target_sha256=DIGEST, target_size=9, draft_sha256=DIGEST, draft_size=9, num_shared=9
)


def write(directory: Path, weights: bytes = b"weights") -> Path:
    """Of files that no runtime could open: here only the lists count."""
    for role in ("target", "draft"):
        (directory / role / "gguf").mkdir(parents=True)
        (directory / role / "gguf" / "model.gguf").write_bytes(weights + role.encode())
        (directory / role / "onnx" / "sub").mkdir(parents=True)
        (directory / role / "onnx" / "manifest.json").write_text(role)
        (directory / role / "onnx" / "sub" / "data").write_text("data")
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text("{}")

    def member(role: str) -> Member:
        variants = [
            Variant(
                format=format,
                quantization="q",
                path=path,
                files=list_files(directory, directory / path),
            )
            for format, path in (("gguf", f"{role}/gguf/model.gguf"), ("onnx", f"{role}/onnx"))
        ]
        return Member(name=f"tiny-{role}", num_layers=2, source_sha256=None, variants=variants)

    manifest = PairManifest(
        name="tiny",
        kind=None,
        target=member("target"),
        draft=member("draft"),
        tokenizer=FileEntry(sha256=sha256_file(tokenizer), num_bytes=2),
        chat_template_sha256=None,
        vocabulary=PROOF,
        versions={"edge-spec": "0"},
    )
    write_listing(directory, manifest)
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "pair")


def edit(directory: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((directory / PAIR_MANIFEST).read_text())
    change(manifest)
    (directory / PAIR_MANIFEST).write_text(json.dumps(manifest))


def test_a_pair_lists_every_file_and_says_so_again(directory: Path) -> None:
    files = read_listing(directory, PairManifest).files
    on_disk = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert set(files) == on_disk - {PAIR_MANIFEST}
    assert files["target/onnx/sub/data"].num_bytes == 4


def test_a_model_keeps_its_identity_where_it_is_copied(directory: Path, tmp_path: Path) -> None:
    copy = directory.rename(tmp_path / "elsewhere")
    again = write(tmp_path / "again")
    other = write(tmp_path / "other", b"other weights")
    identities = [Source(str(path), quiet).identity for path in (copy, again, other)]
    assert identities[0] == identities[1] != identities[2]
    assert Source(str(copy / "draft"), quiet).identity != identities[0]


def linked(file: Path) -> None:
    file.rename(file.parents[3] / "secret")
    file.symlink_to(file.parents[3] / "secret")


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("gguf/model.gguf", lambda file: file.write_bytes(b"weights"), r"model\.gguf has 7 bytes"),
        ("gguf/model.gguf", lambda file: file.write_bytes(b"weightsTarget"), "match the sha256"),
        ("gguf/model.gguf", linked, "is missing"),
        ("onnx/manifest.json", lambda file: file.write_text("forged"), "match the sha256"),
    ],
    ids=["size", "hash", "link", "manifest of a bundle, which vouches for its files"],
)
def test_a_changed_file_is_refused_when_it_is_opened(
    directory: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    damage(directory / "target" / name)
    member = find_member(directory)
    assert member is not None
    damaged, whole = ("gguf", "onnx") if "gguf" in name else ("onnx", "gguf")
    with pytest.raises(BundleError, match=told):
        member.path(damaged)
    assert member.path(whole).exists()


def first(manifest: Any) -> Any:
    return manifest["target"]["variants"][0]


ENTRY = {"sha256": DIGEST, "num_bytes": 1}
LIES: dict[str, Callable[[Any], object]] = {
    "version": lambda m: m.update(schema_version=2),
    "no target": lambda m: m.pop("target"),
    "unknown key": lambda m: m.update(run="rm -rf"),
    "no formats": lambda m: m["target"].update(variants=[]),
    "format twice": lambda m: m["target"]["variants"].append(first(m)),
    "path above": lambda m: first(m).update(path="../model.gguf"),
    "absolute path": lambda m: first(m).update(path="/etc/passwd"),
    "path of the other role": lambda m: first(m).update(path="draft/gguf/model.gguf"),
    "file above": lambda m: first(m)["files"].update({"target/../../x": ENTRY}),
    "file of another variant": lambda m: first(m)["files"].update({"target/onnx/x": ENTRY}),
    "drive": lambda m: first(m)["files"].update({"target/gguf/C:x": ENTRY}),
    "no files": lambda m: first(m).update(files={}),
    "too many files": lambda m: first(m).update(
        files={f"target/gguf/model.gguf/{i}": ENTRY for i in range(10_001)}
    ),
    "hash that is none": lambda m: m["tokenizer"].update(sha256="zz"),
    "negative size": lambda m: m["tokenizer"].update(num_bytes=-1),
    "name with a path": lambda m: m["target"].update(name="../../cache"),
    "long note": lambda m: m.update(notes=["x" * 5000]),
    "draft without a proof": lambda m: m.update(vocabulary=None),
    "proof without a draft": lambda m: m.update(draft=None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_pair_json_that_cannot_be_true_is_refused_in_one_line(directory: Path, lie: str) -> None:
    edit(directory, LIES[lie])
    with pytest.raises(BundleError) as caught:
        read_listing(directory, PairManifest)
    text = str(caught.value)
    assert PAIR_MANIFEST in text and "export the pair again" in text
    assert "\n" not in text and len(text) < 500 and "pydantic" not in text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b" " * 16_000_001])
def test_what_is_no_pair_json_is_refused(directory: Path, content: bytes) -> None:
    (directory / PAIR_MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=r"pair\.json"):
        Source(str(directory), quiet).name  # noqa: B018 -- the property is what is tested


def test_what_is_not_listed_is_foreign(directory: Path) -> None:
    assert find_foreign(directory, read_listing(directory, PairManifest)) == []
    (directory / "target" / "extra").touch()
    (directory / "link").symlink_to(directory.parent)
    expected = ["link", "target/extra"]
    assert find_foreign(directory, read_listing(directory, PairManifest)) == expected


def test_only_an_empty_directory_or_a_pair_alone_may_be_replaced(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert may_replace(tmp_path / "empty", PairManifest) and may_replace(directory, PairManifest)
    (directory / "diary.txt").touch()
    assert not may_replace(directory, PairManifest)
    (directory / "diary.txt").unlink()
    (tmp_path / "link").symlink_to(directory)
    assert may_replace(tmp_path / "link", PairManifest)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert not may_replace(tmp_path / "other", PairManifest)
    assert not may_replace(tmp_path / "other" / "file", PairManifest)
    (directory / PAIR_MANIFEST).write_text("{}")
    assert not may_replace(directory, PairManifest)
