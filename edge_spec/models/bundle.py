"""Bundles: directories of converted models, and the manifests that describe them.

Exporters write bundles, runtimes read them. Nothing in a bundle is executed: a manifest is JSON, a
chat template runs in a sandbox. A pair bundle has a target and optionally a draft, each in several
formats:

    pair.json               its manifest
    tokenizer.json          the target's
    target/onnx/            an ordinary bundle, with a manifest.json
    target/gguf/model.gguf
    draft/...               the same
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from edge_spec.core.config import ModelConfig, config_problem
from edge_spec.errors import BundleError, UsageError, readable
from edge_spec.storage.atomic import atomic_file, is_work, sha256_file
from edge_spec.storage.measurements import known_sha256

MANIFEST = "manifest.json"
PAIR_MANIFEST = "pair.json"
TOKENIZER = "tokenizer.json"
PARTS_FILE = "parts.json"  # added later; a kill may leave it unlisted
ROLES = ("target", "draft")
MAX_MANIFEST_BYTES = 16_000_000
MAX_TEXT_CHARACTERS = 2000  # of one text in pair.json
EXPORT_AGAIN = "Delete the directory and export the model again."

# Windows opens these as devices in any directory, with any extension.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in "0123456789\u00b9\u00b2\u00b3"}
)
_FORBIDDEN = frozenset({"\\", ":", *map(chr, range(32))})
_SHOWN = 200  # characters of a file's content in a message
_MAX_FILES = 10_000  # of one variant; a Core ML package has fewer than ten
# Several times any model's, yet cheap to compute with. Bundles have intermediate_size 0 for
# architectures that do not declare it.
_MAX_COUNTS = {
    "num_layers": 10_000,
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 1 << 12),
    **dict.fromkeys(("num_experts", "experts_used"), 1 << 16),
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 22,
    **dict.fromkeys(("intermediate_size", "context_length"), 1 << 24),
}
_MAY_BE_NONE = ("intermediate_size", "num_experts", "experts_used")
_MAX_NUMBER = 2.0**64  # of any number in an architecture
_MAX_BLOCK = 1 << 16  # weights of one scale
_BLOCK = re.compile(r"block (\d+)")  # of a quantization


@cache
def _architecture() -> TypeAdapter[ModelConfig]:
    return TypeAdapter(ModelConfig)


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Becomes part of file names in the cache.
_Name = Annotated[str, Field(pattern=r"^[^/\\:\x00-\x1f]{1,200}$")]
_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]


class Stated(BaseModel):
    """Base of manifests' parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class FileEntry(Stated):
    sha256: _Digest
    num_bytes: int = Field(ge=0)


class CompiledFor(Stated):
    """Binds a bundle to one NPU. versions: of the compiler's parts, by name. outside: for each
    function, operators left to the CPU, counted by name."""

    soc: str = Field(pattern=r"^[A-Z0-9]{1,20}$")
    htp_arch: int = Field(ge=1, le=999)
    versions: Mapping[str, str]
    shares_weights: bool  # one binary has the weights of all functions
    outside: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        return f"{self.soc} (HTP v{self.htp_arch})"


class Manifest(Stated):
    file_name: ClassVar[str] = MANIFEST
    remedy: ClassVar[str] = EXPORT_AGAIN

    schema_version: Literal[1] = 1
    format: str  # the exporter that wrote it, such as "onnx"
    name: str
    architecture: dict[str, object]  # ModelConfig.to_dict()
    tokenizer_sha256: str
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    sampling: dict[str, float] = {}  # recommended by its makers, by fields of SamplingParams
    named_templates: dict[str, str] = {}  # those other than `chat_template`
    # As templates receive them, such as {"bos_token": "<s>"}.
    special_tokens: dict[str, str | tuple[str, ...]] = {}
    quantization: str
    source_sha256: str | None  # of the source, if it was one file
    parity: dict[str, float]  # distance from the source, on the packaged text
    # "growing": the ONNX graph takes the past and returns it with the pass appended. "whole": it
    # reads the whole cache, used or not, in passes of few rows.
    kv_cache: Literal["shared", "whole", "growing"] = "shared"
    notes: tuple[str, ...] = ()  # what the exporter left out and why, a line each
    compiled: CompiledFor | None = None  # for a bundle that runs on one NPU alone
    files: dict[str, FileEntry]  # by path in the bundle, with "/"

    @property
    def weights(self) -> str:
        """Return what kernels are chosen by: a whole cache has others, with other costs."""
        return self.quantization + (" stacked" if self.kv_cache == "whole" else "")


class Variant(Stated):
    format: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
    quantization: _Text  # of the stored weights, such as "int4 block 32"
    compute: _Text | None = None  # unit that it was laid out for, if any
    path: _Text  # of a bundle's directory or a file in the pair bundle, with "/"
    parity: dict[str, float] = {}  # distance from the source, if checked
    why: _Text = ""  # reason for this format and quantization
    files: Annotated[dict[str, FileEntry], Field(min_length=1, max_length=_MAX_FILES)]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def is_bundle(self) -> bool:
        """Return whether it is an ordinary bundle, whose manifest lists its other files."""
        return f"{self.path}/{MANIFEST}" in self.files


class Member(Stated):
    """One model in all its formats."""

    name: _Name
    num_layers: Annotated[int, Field(ge=1)]
    source_sha256: _Digest | None  # of the source, if it was one file
    variants: Annotated[tuple[Variant, ...], Field(min_length=1, max_length=20)]

    @property
    def formats(self) -> list[str]:
        return [variant.format for variant in self.variants]


class VocabularyProof(Stated):
    """Digests by `Vocabulary`, proving that the draft's tokens are the target's."""

    target_sha256: _Digest
    target_size: int
    draft_sha256: _Digest
    draft_size: int
    num_shared: int  # ids in both; each is the same token in both, padding aside


class PairManifest(Stated):
    file_name: ClassVar[str] = PAIR_MANIFEST
    remedy: ClassVar[str] = "Delete the directory and export the pair again."

    schema_version: Literal[1] = 1
    name: _Name
    kind: _Text | None  # of device that formats and quantizations were chosen for
    notes: tuple[_Text, ...] = ()  # what that kind of device lacks and why
    target: Member
    draft: Member | None
    tokenizer: FileEntry
    chat_template_sha256: _Digest | None
    vocabulary: VocabularyProof | None
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
        yield ROLES[0], self.target
        if self.draft is not None:
            yield ROLES[1], self.draft

    @property
    def files(self) -> dict[str, FileEntry]:
        """All listed files by path in the pair bundle."""
        listed = {TOKENIZER: self.tokenizer}
        for _, member in self.members():
            for variant in member.variants:
                listed |= variant.files
        return listed


_Manifest = TypeVar("_Manifest", Manifest, PairManifest)
_Model = TypeVar("_Model", bound=BaseModel)


def read_listing(directory: Path, kind: type[_Manifest]) -> _Manifest:
    """Read a manifest; its files and architecture are not checked. Raises BundleError."""
    return read_model(directory / kind.file_name, kind, kind.remedy)


def read_model(path: Path, kind: type[_Model], remedy: str) -> _Model:
    """Read a JSON file of at most MAX_MANIFEST_BYTES. Raises BundleError with this remedy."""
    try:
        size = regular_size(path)
        if size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path} is too large", remedy=remedy)
        with path.open("rb") as file:
            return kind.model_validate_json(file.read(size))
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error}", remedy=remedy) from None
    except ValidationError as error:
        raise _invalid(path, error, remedy) from None


def _invalid(path: Path, error: ValidationError, remedy: str) -> BundleError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    what = f"{where[:_SHOWN]}: {first['msg'][:_SHOWN]}"
    return BundleError(f"{path} is not valid: {what}", remedy=remedy)


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json and check its architecture, not its files. Raises BundleError, and
    UsageError for a path that is not UTF-8."""
    require_readable(directory)
    path, manifest = directory / MANIFEST, read_listing(directory, Manifest)
    try:
        ModelConfig.from_dict(manifest.architecture)
        _architecture().validate_json(json.dumps(manifest.architecture), strict=True)
    except ValidationError as error:
        raise _invalid(path, error, EXPORT_AGAIN) from None
    except (TypeError, AttributeError) as error:
        raise BundleError(
            f"{path}: bad architecture: {str(error)[:_SHOWN]}", remedy=EXPORT_AGAIN
        ) from None
    problem = _find_problem(manifest)
    if problem:
        raise BundleError(f"{path}: {problem}", remedy=EXPORT_AGAIN)
    return manifest


def _find_problem(manifest: Manifest) -> str | None:
    """Return why no model can match this manifest; a runtime checks the tensors."""
    config = ModelConfig.from_dict(manifest.architecture)
    for name, largest in _MAX_COUNTS.items():
        least = 0 if name in _MAY_BE_NONE else 1
        if not least <= getattr(config, name) <= largest:
            return f"{name} is not from {least} to {largest:,}"
    scaling = config.rope_scaling
    numbers = [config.norm_epsilon, config.rope_theta]
    if scaling is not None:
        numbers += [scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor]
        numbers += [scaling.original_context_length, *scaling.factors]
    if not all(abs(number) <= _MAX_NUMBER for number in numbers):
        return "it has a number that no model has"
    if config.features() and (problem := config_problem(config)):
        return problem
    blocks = _BLOCK.findall(manifest.quantization)
    if not all(len(block) < 9 and 1 <= int(block) <= _MAX_BLOCK for block in blocks):
        return f"its quantization has blocks that are not of 1 to {_MAX_BLOCK:,} weights"
    return None


def require_readable(path: Path, user: str = "a bundle") -> None:
    """Raise UsageError for a path that is not UTF-8: JSON and libraries cannot name it."""
    if readable(str(path.absolute())) != str(path.absolute()):
        raise UsageError(
            f"{path} is no path in UTF-8, as {user} needs", remedy="Choose another name."
        )


def regular_size(path: Path) -> int:
    """Return the size in bytes. Raises OSError unless it is a file or a link to one; others may be
    endless."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return found.st_size


def is_below(name: str) -> bool:
    """Return whether this is a plain relative path on every system: no root, drive, device, step
    upwards, or part that a system would rename."""
    return all(
        part
        and part[-1] not in ". "  # Windows drops them
        and _FORBIDDEN.isdisjoint(part)
        and part.partition(".")[0].rstrip(" ").lower() not in _DEVICES
        for part in name.split("/")
    )


def list_files(directory: Path, start: Path) -> dict[str, FileEntry]:
    """Return the files at or below `start` with their hashes, by path in `directory`."""
    found = sorted(start.rglob("*")) if start.is_dir() else [start]
    named = {file.relative_to(directory).as_posix(): file for file in found if not file.is_dir()}
    return {
        name: FileEntry(sha256=sha256_file(file), num_bytes=file.stat().st_size)
        for name, file in named.items()
    }


def check_file(directory: Path, name: str, entry: FileEntry, hashed: bool = True) -> None:
    """Raise BundleError unless the file is below the directory, no link and as in `entry`. hashed:
    read its content."""
    file = directory / name
    if not is_below(name):
        problem = f"{directory} lists a file outside itself: {name[:_SHOWN]}"
    elif not file.is_file() or any(
        part.is_symlink() for part in (file, *file.parents[: name.count("/")])
    ):
        problem = f"{file} is missing"
    elif (size := file.stat().st_size) != entry.num_bytes:
        problem = f"{file} has {size} bytes, expected {entry.num_bytes}"
    elif hashed and known_sha256(file) != entry.sha256:
        problem = f"{file} does not match the sha256 in its manifest"
    else:
        return
    raise BundleError(problem, remedy=EXPORT_AGAIN)


def find_foreign(directory: Path, manifest: Manifest | PairManifest | None) -> list[str]:
    """Return files and links that are neither listed nor added later."""
    known = {manifest.file_name, *manifest.files} if manifest else set()
    if isinstance(manifest, Manifest):
        known.add(PARTS_FILE)
    found = (
        path.relative_to(directory).as_posix()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or not (path.is_dir() or is_work(path))
    )
    return [name for name in found if name not in known]


def may_replace(out: Path, kind: type[_Manifest]) -> bool:
    """Return whether `out` is an empty directory, or contains only what its manifest lists."""
    if not out.is_dir():
        return False
    try:
        return not find_foreign(out, read_listing(out, kind))
    except BundleError:
        return not find_foreign(out, None)


@dataclass(frozen=True, eq=False)
class Bundle:
    """An opened bundle, valid and with the files it lists."""

    path: Path
    manifest: Manifest

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.manifest.architecture)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.manifest.files.values())

    def file(self, name: str) -> Path:
        """Return a file's path. Raises BundleError for an unlisted file."""
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no file {name}", remedy=EXPORT_AGAIN)
        return self.path / name


def is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_bundle(path: Path, hashed: bool = True) -> Bundle:
    """Read the manifest and check each file's size and, if `hashed`, sha256. Raises BundleError."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(path, name, entry, hashed)
    return Bundle(path, manifest)


def write_manifest(
    path: Path, hashed: Mapping[str, FileEntry] | None = None, **fields: object
) -> Manifest:
    """Write the manifest of the files below `path`. hashed: from `list_files`, if known."""
    files = list_files(path, path) if hashed is None else hashed
    manifest = Manifest.model_validate(
        {**fields, "files": files, "tokenizer_sha256": files[TOKENIZER].sha256}
    )
    write_listing(path, manifest)
    return manifest


def write_listing(directory: Path, manifest: Manifest | PairManifest) -> None:
    with atomic_file(directory / manifest.file_name) as work:
        work.write_bytes((manifest.model_dump_json(indent=2) + "\n").encode())


def add_file(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Add or replace a file. The bundle stays valid at any interruption."""
    others = {other: entry for other, entry in bundle.manifest.files.items() if other != name}
    write_listing(bundle.path, bundle.manifest.model_copy(update={"files": others}))
    with atomic_file(bundle.path / name) as work:
        work.write_bytes(content)
    entry = FileEntry(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
    manifest = bundle.manifest.model_copy(update={"files": {**others, name: entry}})
    write_listing(bundle.path, manifest)
    return Bundle(bundle.path, manifest)


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
        """Identify the model's files, also as a copy on another device."""
        files = [
            (name, entry.sha256) for v in self.member.variants for name, entry in v.files.items()
        ]
        return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()[:16]

    @property
    def draft(self) -> Path | None:
        """Return the path of this model's draft, if any."""
        if self.role == ROLES[1] or self.pair.draft is None:
            return None
        return self.directory / ROLES[1]

    def path(self, format: str) -> Path:
        """Return the path of the variant in this format, checked against pair.json (its files, or
        its manifest). Raises UsageError if there is none, BundleError."""
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
    """Return whether this is a pair bundle, or a bundle or file in one."""
    return any(is_pair(directory) for directory in (path, *path.parents[:3]))


def find_member(path: Path) -> PairMember | None:
    """Return the model that a path in a pair bundle names (the bundle: its target); None for other
    paths. Raises BundleError for an invalid pair.json."""
    if is_pair(path):
        return PairMember(path, ROLES[0], read_listing(path, PairManifest))
    if path.name in ROLES and is_pair(path.parent):
        return PairMember(path.parent, path.name, read_listing(path.parent, PairManifest))
    return None
