"""A bundle: a directory with a converted model and the manifest that describes it.

Exporters write bundles, runtimes read them. Nothing in a bundle is executed: the manifest is
JSON, the chat template runs in a sandbox.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from edge_spec.core.config import ModelConfig, config_problem
from edge_spec.errors import BundleError, UsageError, readable
from edge_spec.storage.atomic import atomic_file, is_work, sha256_file
from edge_spec.storage.measurements import known_sha256

EXPORT_AGAIN = "Delete the directory and export the model again."
# Windows opens these as devices, whatever the folder and the ending.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in "0123456789\u00b9\u00b2\u00b3"}
)
_FORBIDDEN = frozenset({"\\", ":", *map(chr, range(32))})
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTS_FILE = "parts.json"  # is added later; a kill may leave it unlisted
MAX_MANIFEST_BYTES = 16_000_000
_SHOWN = 200  # characters of a name or a value in a message
# Several times what any model has, and little enough to compute with. intermediate_size is 0 in
# bundles of architectures that do not state it.
_MAX_COUNTS = {
    "num_layers": 10_000,
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 1 << 12),
    **dict.fromkeys(("num_experts", "experts_used"), 1 << 16),
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 22,
    **dict.fromkeys(("intermediate_size", "context_length"), 1 << 24),
}
_MAY_BE_NONE = ("intermediate_size", "num_experts", "experts_used")
_MAX_NUMBER = 2.0**64  # of any in an architecture
_MAX_BLOCK = 1 << 16  # weights of one scale
_BLOCK = re.compile(r"block (\d+)")  # of a quantization
_Model = TypeVar("_Model", bound=BaseModel)
_ARCHITECTURE = TypeAdapter(ModelConfig)


class FileEntry(BaseModel):
    """Holds what a manifest says of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_bytes: int = Field(ge=0)


def regular_size(path: Path) -> int:
    """Returns the size in bytes. Raises OSError for what is no file, nor a link to one: it may have
    no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return found.st_size


def list_files(directory: Path, start: Path) -> dict[str, FileEntry]:
    """The files at or below `start`, by their paths in `directory`, with sizes and hashes."""
    found = sorted(start.rglob("*")) if start.is_dir() else [start]
    named = {file.relative_to(directory).as_posix(): file for file in found if not file.is_dir()}
    return {
        name: FileEntry(sha256=sha256_file(file), num_bytes=file.stat().st_size)
        for name, file in named.items()
    }


def check_file(directory: Path, name: str, entry: FileEntry, hashed: bool = True) -> None:
    """Raises BundleError unless it is below the directory, no link, and what `entry` says. hashed:
    else it stays unread, and its content may be another."""
    if not is_below(name):
        raise BundleError(
            f"{directory} lists a file outside itself: {_shown(name)}", remedy=EXPORT_AGAIN
        )
    file = directory / name
    links = any(part.is_symlink() for part in (file, *file.parents[: name.count("/")]))
    if links or not file.is_file():
        raise BundleError(f"{file} is missing", remedy=EXPORT_AGAIN)
    size = file.stat().st_size
    if size != entry.num_bytes:
        raise BundleError(
            f"{file} has {size} bytes, expected {entry.num_bytes}", remedy=EXPORT_AGAIN
        )
    if hashed and known_sha256(file) != entry.sha256:
        raise BundleError(f"{file} does not match the sha256 in its manifest", remedy=EXPORT_AGAIN)


def _shown(name: str) -> str:
    """Cut, and on one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_SHOWN])


def is_below(name: str) -> bool:
    """Says whether it is a plain relative path on every system: no root, drive, device or step
    upwards, and nothing that a system would read as another name."""
    return all(
        part
        and part[-1] not in ". "  # Windows leaves them out
        and _FORBIDDEN.isdisjoint(part)
        and part.partition(".")[0].rstrip(" ").lower() not in _DEVICES
        for part in name.split("/")
    )


class CompiledFor(BaseModel):
    """The part of a manifest that binds a bundle to one NPU.

    versions: of the compiler's parts, by their names. outside: operators that the compiler left to
    the CPU, counted by name, of each function.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    soc: str = Field(pattern=r"^[A-Z0-9]{1,20}$")
    htp_arch: int = Field(ge=1, le=999)
    versions: Mapping[str, str]
    shares_weights: bool  # whether one binary holds the weights of all functions
    outside: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        return f"{self.soc} (HTP v{self.htp_arch})"


class Manifest(BaseModel):
    """The content of manifest.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    format: str  # the exporter that wrote it, for example "onnx"
    name: str
    architecture: dict[str, object]  # ModelConfig.to_dict()
    tokenizer_sha256: str
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    sampling: dict[str, float] = {}  # as its makers recommend, by the names of SamplingParams
    named_templates: dict[str, str] = {}  # other ones than `chat_template`
    # As templates are given them, such as {"bos_token": "<s>"}.
    special_tokens: dict[str, str | tuple[str, ...]] = {}
    quantization: str
    source_sha256: str | None  # of the file it was made from, where it was one file
    parity: dict[str, float]  # distance from the source, on the packaged text
    # "growing": an ONNX graph that takes the past and returns it with the pass after it. "whole":
    # one that reads all of the cache in passes of few rows, in use or not.
    kv_cache: Literal["shared", "whole", "growing"] = "shared"
    notes: tuple[str, ...] = ()  # what the exporter left out, and why; a line each
    compiled: CompiledFor | None = None  # of a bundle that runs on one NPU alone
    files: dict[str, FileEntry]  # by its path in the bundle, with "/"


class Bundle:
    """An opened bundle whose manifest is valid and whose files are the ones it lists."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.manifest.architecture)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.manifest.files.values())

    def file(self, name: str) -> Path:
        """Raises BundleError for a file that the manifest does not list."""
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no file {name}", remedy=EXPORT_AGAIN)
        return self.path / name


def is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def require_readable(path: Path, user: str = "a bundle") -> None:
    """Raises UsageError for a path that is not UTF-8: JSON cannot name it, and no library can."""
    if readable(str(path.absolute())) != str(path.absolute()):
        raise UsageError(
            f"{path} is no path in UTF-8, as {user} needs", remedy="Choose another name."
        )


def may_replace(out: Path) -> bool:
    """Says whether `out` is an empty directory, or holds only what its manifest lists."""
    if not out.is_dir():
        return False
    found = {
        path.relative_to(out).as_posix()
        for path in out.rglob("*")
        if not (path.is_dir() or is_work(path))
    }
    if not found:
        return True
    try:
        manifest = read_model(out / MANIFEST, Manifest, EXPORT_AGAIN)
    except BundleError:
        return False
    return found <= {MANIFEST, PARTS_FILE, *manifest.files}


def open_bundle(path: Path, hashed: bool = True) -> Bundle:
    """Reads the manifest and checks size and sha256 of every file. hashed: else only the sizes, for
    a look at the model alone. Raises BundleError."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(path, name, entry, hashed)
    return Bundle(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the bundle at `path`, whose files are not looked at. Raises
    BundleError, and UsageError for a path that is not UTF-8."""
    require_readable(path)
    manifest = read_model(path / MANIFEST, Manifest, EXPORT_AGAIN)
    try:
        ModelConfig.from_dict(manifest.architecture)
        _ARCHITECTURE.validate_json(json.dumps(manifest.architecture), strict=True)
    except ValidationError as error:
        raise _not_valid(path / MANIFEST, error, EXPORT_AGAIN) from None
    except (TypeError, AttributeError) as error:
        raise BundleError(
            f"{path / MANIFEST}: bad architecture: {str(error)[:_SHOWN]}", remedy=EXPORT_AGAIN
        ) from None
    problem = _problem(manifest)
    if problem:
        raise BundleError(f"{path / MANIFEST}: {problem}", remedy=EXPORT_AGAIN)
    return manifest


def _problem(manifest: Manifest) -> str | None:
    """Why no model can be so; the tensors, which a runtime reads, are not looked at."""
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


def read_model(path: Path, kind: type[_Model], remedy: str) -> _Model:
    """A JSON file of at most MAX_MANIFEST_BYTES. Raises BundleError with this remedy."""
    try:
        size = regular_size(path)
        if size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path} is too large", remedy=remedy)
        with path.open("rb") as file:
            return kind.model_validate_json(file.read(size))
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error}", remedy=remedy) from None
    except ValidationError as error:
        raise _not_valid(path, error, remedy) from None


def _not_valid(path: Path, error: ValidationError, remedy: str) -> BundleError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    what = f"{where[:_SHOWN]}: {first['msg'][:_SHOWN]}"
    return BundleError(f"{path} is not valid: {what}", remedy=remedy)


def write_manifest(
    path: Path, hashed: Mapping[str, FileEntry] | None = None, **fields: object
) -> Manifest:
    """Writes the manifest of the files below `path`. hashed: what `list_files` says of them, where
    that is known; nothing else in `fields` takes its place."""
    files = list_files(path, path) if hashed is None else hashed
    manifest = Manifest.model_validate(
        {**fields, "files": files, "tokenizer_sha256": files[TOKENIZER].sha256}
    )
    (path / MANIFEST).write_bytes(_json(manifest))
    return manifest


def add_file(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Adds or replaces a file. Interrupted at any moment, the bundle stays valid."""
    others = {other: entry for other, entry in bundle.manifest.files.items() if other != name}
    without = bundle.manifest.model_copy(update={"files": others})
    _replace(bundle.path / MANIFEST, _json(without))
    _replace(bundle.path / name, content)
    digest = hashlib.sha256(content).hexdigest()
    entry = FileEntry(sha256=digest, num_bytes=len(content))
    manifest = without.model_copy(update={"files": {**others, name: entry}})
    _replace(bundle.path / MANIFEST, _json(manifest))
    return Bundle(bundle.path, manifest)


def _replace(path: Path, content: bytes) -> None:
    with atomic_file(path) as work:
        work.write_bytes(content)


def _json(manifest: Manifest) -> bytes:
    return (manifest.model_dump_json(indent=2) + "\n").encode()
