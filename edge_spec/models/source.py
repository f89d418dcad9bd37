"""Follows a MODEL argument to a file or directory, and to the bundle cached for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import ModelFileError, UsageError, readable
from edge_spec.models import demo as demo_model
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle, read_manifest
from edge_spec.models.hub.cache import HubModel, find_cached
from edge_spec.models.hub.client import HubReference, is_on_hub
from edge_spec.models.hub.download import open_model
from edge_spec.models.pair_bundle import PairMember, find_member
from edge_spec.storage.atomic import cache_directory, expanded

# Part of every cached bundle's name: raise it when an exporter writes something else.
EXPORT_VERSION = 5
_FORM = "Write --alias NAME=MODEL, with MODEL as it was given or as it is called."


@dataclass(frozen=True)
class Source:
    """A model as the user named it; nothing is fetched until `path` is asked for."""

    model: str
    progress: Progress

    @property
    def is_demo(self) -> bool:
        return self.model == demo_model.NAME

    @cached_property
    def on_hub(self) -> HubModel | None:
        """The model of the hub that is meant, fetched if need be; None for any other.

        Raises DownloadError, UsageError, UnsupportedModelError.
        """
        if not is_on_hub(self.model):
            return None
        return open_model(HubReference.parse(self.model), self.progress)

    @property
    def is_fetched(self) -> bool:
        """Says whether `path` has nothing to fetch. Raises UsageError for no name of the hub."""
        if self.is_demo:
            return self._demo_file is not None
        return not is_on_hub(self.model) or find_cached(HubReference.parse(self.model)) is not None

    @cached_property
    def _demo_file(self) -> Path | None:
        return demo_model.find_demo_model()

    @cached_property
    def path(self) -> Path:
        """Raises ModelFileError where there is no such file, and as `on_hub` does."""
        if self.is_demo:
            return self._demo_file or demo_model.fetch_demo_model(self.progress)
        if self.on_hub is not None:
            return self.on_hub.path
        path = expanded(Path(self.model))
        if not path.exists():
            raise ModelFileError(
                f"no such file or directory: {path}",
                remedy=f"MODEL is a GGUF file, a Hugging Face directory, a bundle directory, "
                f"hf:org/name or {demo_model.NAME}.",
            )
        # A link to a file keeps its name: the caches of other programs name contents by digests.
        return path.parent.resolve() / path.name if path.is_file() else path.resolve()

    @cached_property
    def member(self) -> PairMember | None:
        """The model that is meant, where the path is in a pair bundle. Raises as `path` does, and
        BundleError."""
        return None if self.is_demo else find_member(self.path)

    @property
    def formats(self) -> frozenset[str] | None:
        """Returns the formats that a bundle, or a pair bundle, has it in; None if it can be
        converted. Raises as `member` does."""
        if self.member is not None:
            return frozenset(self.member.member.formats)
        if not self.is_demo and is_bundle(self.path):
            return frozenset({read_manifest(self.path).format})
        return None

    @cached_property
    def header(self) -> ModelInfo:
        """Reads once what a GGUF file says of itself. Raises as `at` does, ModelFileError,
        UnsupportedModelError."""
        return runtimes.open_model_info(self.at("gguf"))

    @property
    def num_bytes(self) -> int:
        """Counts the bytes of the file, or of all that lie in the directory. Raises as `path` does,
        OSError."""
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)

    @property
    def profiles(self) -> Path | None:
        """Returns where profiles that came with the model are, if any did."""
        return None if self.member is None else self.member.profiles

    def at(self, reads: str) -> Path:
        """Returns where a runtime finds what it reads (`Runtime.reads`): the path, or the variant
        of a pair bundle. Raises as `member` does, and UsageError for a format that a pair bundle
        lacks."""
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
        """Returns where the conversion of this model is kept, whether or not it exists yet.

        The name changes with the model, the options and EXPORT_VERSION.
        """
        digest = _digest(repr((self._identity, format, options, EXPORT_VERSION)))
        return cache_directory() / "bundles" / f"{self.name}-{format}-{digest}"

    @property
    def identity(self) -> str:
        """Changes with the model: a part of the names of what is kept for it."""
        return _digest(self._identity)

    @property
    def _identity(self) -> str:
        """The demo's hash, or that of the files on the hub or in a pair bundle; else path, size
        and time of change of the model's files."""
        if self.is_demo:
            return demo_model.SHA256
        if self.on_hub is not None:
            return self.on_hub.identity
        if self.member is not None:
            return self.member.identity
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        stats = [(str(file), file.stat()) for file in files]
        return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ServedNames:
    """name: what lists and answers have; aliases: what requests may say, too."""

    name: str
    aliases: tuple[str, ...] = ()


def served_names(models: Sequence[str], asked: Sequence[str]) -> list[ServedNames]:
    """Returns the names of models: the first alias that was asked for goes before a model's own
    name, which it keeps as another one where no other model has it. Nothing is fetched.

    asked: "NAME=MODEL", or "NAME" where there is one model. Raises UsageError for an alias of no
    model and for a name of several, ModelFileError for a MODEL that does not exist.
    """
    own = [_own_name(model) for model in models]
    given: list[list[str]] = [[] for _ in models]
    for alias in asked:
        name, model = _read_alias(alias, models)
        given[_index(model, models, own)].append(name)
    names = [
        list(dict.fromkeys([*aliases, name] if not aliases or own.count(name) == 1 else aliases))
        for aliases, name in zip(given, own, strict=True)
    ]
    every = [name for each in names for name in each]
    for name in every:
        if every.count(name) > 1:
            raise UsageError(
                f"two models are called {name!r}", remedy=f"Give one another name. {_FORM}"
            )
    return [ServedNames(each[0], tuple(each[1:])) for each in names]


def _own_name(model: str) -> str:
    source = Source(model, lambda what, fraction: None)
    if not is_on_hub(model) or source.is_fetched:
        return source.name
    reference = HubReference.parse(model)
    return reference.name if reference.file is None else Path(reference.file).stem


def _read_alias(alias: str, models: Sequence[str]) -> tuple[str, str]:
    name, equals, model = alias.partition("=")
    if not name.isprintable() or not name.strip():
        raise UsageError(f"{alias!r} gives no name", remedy=_FORM)
    if equals:
        return name, model
    if len(models) > 1:
        raise UsageError(f"--alias {alias} does not say of which model", remedy=_FORM)
    return name, models[0]


def _index(model: str, models: Sequence[str], own: Sequence[str]) -> int:
    """Returns the place of the one model that was given so, or that is called so."""
    found = [i for i, each in enumerate(models) if each == model]
    found = found or [i for i, name in enumerate(own) if name == model]
    if len(found) != 1:
        what = "no model" if not found else "more than one model"
        raise UsageError(f"{what} of this server is {model!r}", remedy=_FORM)
    return found[0]
