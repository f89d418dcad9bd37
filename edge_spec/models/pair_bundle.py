"""A pair bundle: one directory with a target, and perhaps a draft, each in several formats.

    pair.json               what this module reads and writes
    tokenizer.json          the target's
    target/onnx/            an ordinary bundle (edge_spec/models/bundle.py)
    target/gguf/model.gguf
    draft/...               the same
    profiles/               what passes take on a device; added later, listed nowhere

As in an ordinary bundle, nothing here is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edge_spec.errors import BundleError, UsageError
from edge_spec.models.bundle import MANIFEST, TOKENIZER, FileEntry, check_file, is_below, read_model

PAIR_MANIFEST = "pair.json"
PROFILES = "profiles"
ROLES = ("target", "draft")
MAX_TEXT_CHARACTERS = 2000  # of one text in pair.json

_MAX_FILES = 10_000  # of one variant; a Core ML package has fewer than ten
_EXPORT_AGAIN = "Delete the directory and export the pair again."
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Becomes a part of file names in the cache.
_Name = Annotated[str, Field(pattern=r"^[^/\\:\x00-\x1f]{1,200}$")]
_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]


class Variant(BaseModel):
    """One model in one format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
    quantization: _Text  # as the weights are stored, such as "int4 block 32"
    compute: _Text | None = None  # the unit that it was laid out for, where it was for one
    path: _Text  # in the pair bundle, with "/": of a bundle's directory, or of a file
    parity: dict[str, float] = {}  # distance from the source, where it was checked
    why: _Text = ""  # this format and quantization
    files: Annotated[dict[str, FileEntry], Field(min_length=1, max_length=_MAX_FILES)]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def is_bundle(self) -> bool:
        """Says whether it is an ordinary bundle, whose manifest vouches for its other files."""
        return f"{self.path}/{MANIFEST}" in self.files


class Member(BaseModel):
    """One model, in all formats that were written of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    num_layers: Annotated[int, Field(ge=1)]
    source_sha256: _Digest | None  # of the file it was made from, where it was one file
    variants: Annotated[tuple[Variant, ...], Field(min_length=1, max_length=20)]

    @property
    def formats(self) -> list[str]:
        return [variant.format for variant in self.variants]


class VocabularyProof(BaseModel):
    """Proves that the draft's tokens are the target's, by digests as `Vocabulary` makes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_sha256: _Digest
    target_size: int
    draft_sha256: _Digest
    draft_size: int
    num_shared: int  # ids that both have; all of them stand for the same token, padding apart


class PairManifest(BaseModel):
    """The content of pair.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    name: _Name
    kind: _Text | None  # of device that formats and quantizations were chosen for
    notes: tuple[_Text, ...] = ()  # what that kind of device does without, and why
    target: Member
    draft: Member | None
    tokenizer: FileEntry
    chat_template_sha256: _Digest | None
    vocabulary: VocabularyProof | None  # None without a draft
    versions: dict[str, str]  # of edge-spec and of the libraries that wrote the formats

    @model_validator(mode="after")
    def _check_paths(self) -> PairManifest:
        for role, member in self.members():
            if len(set(member.formats)) < len(member.formats):
                raise ValueError(f"the {role} has a format twice")
            for variant in member.variants:
                for name in (variant.path, *variant.files):
                    if not is_below(name) or not name.startswith(f"{role}/"):
                        raise ValueError(f"a file outside of {role}/ is listed: {name}")
                if not all(f"{name}/".startswith(f"{variant.path}/") for name in variant.files):
                    raise ValueError(f"a file outside of {variant.path} is listed for it")
        if (self.draft is None) != (self.vocabulary is None):
            raise ValueError("a draft and the proof of its vocabulary come together")
        return self

    def members(self) -> Iterator[tuple[str, Member]]:
        """Role and model."""
        yield ROLES[0], self.target
        if self.draft is not None:
            yield ROLES[1], self.draft

    @property
    def files(self) -> dict[str, FileEntry]:
        """All that is listed, by its path in the pair bundle."""
        listed = {TOKENIZER: self.tokenizer}
        for _, member in self.members():
            for variant in member.variants:
                listed |= variant.files
        return listed


@dataclass(frozen=True)
class PairMember:
    """The target or the draft of an opened pair bundle."""

    directory: Path  # of the pair bundle
    role: str
    pair: PairManifest

    @cached_property
    def member(self) -> Member:
        member = dict(self.pair.members()).get(self.role)
        if member is None:
            raise UsageError(
                f"{self.directory} has no {self.role}", remedy="Export it again with --draft."
            )
        return member

    @property
    def identity(self) -> str:
        """Changes with the model's files, and with nothing else: a copy on another device has it,
        too."""
        files = [
            (name, entry.sha256) for v in self.member.variants for name, entry in v.files.items()
        ]
        return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()[:16]

    @property
    def draft(self) -> Path | None:
        """Returns where the draft for this model is; None for a draft, and if there is none."""
        if self.role == ROLES[1] or self.pair.draft is None:
            return None
        return self.directory / ROLES[1]

    @property
    def profiles(self) -> Path:
        return self.directory / PROFILES

    def path(self, format: str) -> Path:
        """Returns the path of the variant in this format, whose files, or whose manifest, are what
        pair.json says.

        Raises UsageError where there is none, BundleError.
        """
        formats = self.member.formats
        if format not in formats:
            raise UsageError(
                f"{self.directory} has its {self.role} as {' and '.join(formats)}, not as {format}",
                remedy="Choose a --runtime that reads one of these, or export the pair again with "
                f"{format}.",
            )
        variant = self.member.variants[formats.index(format)]
        vouching = [f"{variant.path}/{MANIFEST}"] if variant.is_bundle else list(variant.files)
        for name in vouching:
            check_file(self.directory, name, variant.files[name])
        return self.directory / variant.path


def is_pair(path: Path) -> bool:
    return (path / PAIR_MANIFEST).is_file()


def is_in_pair(path: Path) -> bool:
    """Says whether it is a pair bundle, or a bundle or file in one."""
    return any(is_pair(directory) for directory in (path, *path.parents[:3]))


def find_member(path: Path) -> PairMember | None:
    """A pair bundle stands for its target; its directories target/ and draft/ for one of the two.

    None for any other path. Raises BundleError for a pair.json that is not valid.
    """
    if is_pair(path):
        return PairMember(path, ROLES[0], read_pair(path))
    if path.name in ROLES and is_pair(path.parent):
        return PairMember(path.parent, path.name, read_pair(path.parent))
    return None


def read_pair(path: Path) -> PairManifest:
    """The files are not looked at. Raises BundleError."""
    return read_model(path / PAIR_MANIFEST, PairManifest, _EXPORT_AGAIN)


def write_pair(path: Path, manifest: PairManifest) -> None:
    (path / PAIR_MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def foreign_files(directory: Path, manifest: PairManifest) -> list[str]:
    """Files and links that pair.json does not list; profiles may be added."""
    known = {PAIR_MANIFEST, *manifest.files}
    found = (path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file())
    names = (path.relative_to(directory) for path in found)
    return [
        name.as_posix()
        for name in names
        if name.as_posix() not in known
        and not (len(name.parts) == 2 and name.parts[0] == PROFILES and name.suffix == ".json")
    ]


def may_replace_pair(out: Path) -> bool:
    """Says whether `out` is an empty directory, or a pair bundle with nothing foreign in it."""
    if out.is_symlink() or not out.is_dir():
        return False
    if not any(out.iterdir()):
        return True
    try:
        return not foreign_files(out, read_pair(out))
    except BundleError:
        return False
