"""A model that `edge-spec doctor` looks at: a pair bundle, a bundle, a GGUF file or a Hugging Face
directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import BundleError, UnknownArchitectureError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, Manifest, is_bundle, open_unhashed, read_manifest
from edge_spec.models.model_text import text_of_bundle, text_of_info, text_with
from edge_spec.models.pair_bundle import (
    ROLES,
    PairManifest,
    Variant,
    find_member,
    is_pair,
    read_pair,
)
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.tokenizer import Tokenizer

# What architectures are converted to that our own readers do not know.
OTHER_FORMAT = next(iter(runtimes.OTHER_ARCHITECTURES))


@dataclass(frozen=True)
class Examined:
    """One model in one format. What it says of itself is read when it is asked for, which may raise
    an EdgeSpecError."""

    role: str
    format: str
    path: Path
    listed: Variant | None = None  # by pair.json
    is_other: bool = False  # a directory of an architecture that only another exporter knows

    def __str__(self) -> str:
        return f"{self.role} {self.format}" if self.listed else self.format

    @cached_property
    def source(self) -> Any:
        """Returns what a runtime opens. The files of a bundle are not looked at again."""
        if self.is_bundle:
            return Bundle(self.path, read_manifest(self.path))
        if self.is_other:
            return runtimes.exporter_for(OTHER_FORMAT, self.path)[1]
        read = runtimes.open_checkpoint if self.path.is_dir() else runtimes.open_model_info
        return read(self.path)

    @property
    def is_bundle(self) -> bool:
        return is_bundle(self.path)

    @property
    def manifest(self) -> Manifest | None:
        return self.source.manifest if self.is_bundle else None

    @property
    def config(self) -> ModelConfig:
        """Returns its architecture; asked only of one that is not `is_other`: its shape is known
        when it is converted."""
        config: ModelConfig = self.source.config
        return config

    @cached_property
    def vocab_size(self) -> int:
        """Returns the model's, or the tokenizer's of one that `is_other`."""
        if self.is_other:
            return _num_tokens(self.text.tokenizer)
        return self.config.vocab_size

    @cached_property
    def text(self) -> ChatFormat:
        if self.is_bundle:
            return text_of_bundle(self.source)
        if self.is_other:
            return _text_of_other(self.source)
        reader = "reference" if self.path.is_dir() else "llamacpp"
        return text_of_info(self.source, runtimes.load_runtime(reader))


@dataclass(frozen=True)
class Subject:
    """hashes: whether files are hashed even where that takes seconds."""

    path: Path
    pair: PairManifest | None
    variants: tuple[Examined, ...]
    progress: Progress
    hashes: bool = False

    @property
    def is_other(self) -> bool:
        """Says whether only another exporter knows the architecture: what is at `path` it converts,
        or has, and the variant is in the cache."""
        return self.variants[0].is_other or (
            self.pair is None and self.variants[0].path != self.path
        )

    @property
    def roles(self) -> dict[str, list[Examined]]:
        """The variants of each model."""
        found: dict[str, list[Examined]] = {}
        for each in self.variants:
            found.setdefault(each.role, []).append(each)
        return found


def open_subject(
    path: Path,
    progress: Progress,
    hashes: bool = False,
    kept: Callable[[], Path] | None = None,
) -> Subject:
    """kept: where a model is kept that only another exporter knows, once that has converted it.

    Raises ModelFileError for a manifest or a header that is not valid, and for what is none of the
    four, UnsupportedModelError; MissingDependencyError where that exporter is not installed.
    """
    if is_pair(path):
        pair = read_pair(path)
        variants = tuple(
            Examined(role, variant.format, path / variant.path, variant)
            for role, member in pair.members()
            for variant in member.variants
        )
        return Subject(path, pair, variants, progress, hashes)
    member = find_member(path)
    if member is not None:  # the target or the draft of a pair bundle, alone
        return open_subject(member.directory / member.member.variants[0].path, progress, hashes)
    if is_bundle(path):
        bundle = Examined(ROLES[0], read_manifest(path).format, path)
        return Subject(path, None, (bundle,), progress, hashes)
    alone = Examined(ROLES[0], "checkpoint" if path.is_dir() else "gguf", path)
    try:
        alone.source  # noqa: B018 -- raises for what is none
    except UnknownArchitectureError:
        alone = _other(path, kept)
    return Subject(path, None, (alone,), progress, hashes)


def _other(path: Path, kept: Callable[[], Path] | None) -> Examined:
    """Describes it as it was converted already, else by what is known before. Raises as
    `open_subject`."""
    if kept is not None:
        bundle = kept()
        with suppress(BundleError):
            return Examined(ROLES[0], open_unhashed(bundle).manifest.format, bundle)
    other = Examined(ROLES[0], "checkpoint", path, is_other=True)
    other.source  # noqa: B018 -- raises where it cannot be converted
    return other


def _text_of_other(source: Any) -> ChatFormat:
    tokenizer = Tokenizer(source.read_tokenizer(), source.bos_id if source.adds_bos else None)
    return text_with(tokenizer, source, _num_tokens(tokenizer))


def _num_tokens(tokenizer: TextCodec) -> int:
    return 1 + max(tokenizer.vocabulary().values(), default=-1)
