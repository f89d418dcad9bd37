"""What `edge-spec doctor` looks at: a pair bundle, a bundle or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edge_spec import plugins
from edge_spec.architecture import ModelConfig
from edge_spec.bundle import Bundle, Manifest, is_bundle, read_manifest
from edge_spec.errors import UsageError
from edge_spec.model import Progress
from edge_spec.pair_bundle import ROLES, PairManifest, Variant, is_pair, read_pair
from edge_spec.parts import TextFormat
from edge_spec.preparation import text_of_bundle, text_of_published


@dataclass(frozen=True)
class Examined:
    """One model in one format. What it says of itself is read when it is asked for, which may raise
    an EdgeSpecError."""

    role: str
    format: str
    path: Path
    listed: Variant | None = None  # by pair.json

    def __str__(self) -> str:
        return f"{self.role} {self.format}" if self.listed else self.format

    @cached_property
    def source(self) -> Any:
        """What a runtime opens. The files of a bundle are not looked at again."""
        if self.is_bundle:
            return Bundle(self.path, read_manifest(self.path))
        return plugins.open_published(self.path)

    @property
    def is_bundle(self) -> bool:
        return is_bundle(self.path)

    @property
    def manifest(self) -> Manifest | None:
        return self.source.manifest if self.is_bundle else None

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.source.config
        return config

    @cached_property
    def text(self) -> TextFormat:
        if self.is_bundle:
            return text_of_bundle(self.source)
        return text_of_published(self.source, plugins.load_runtime("llamacpp"))


@dataclass(frozen=True)
class Subject:
    path: Path
    pair: PairManifest | None
    variants: tuple[Examined, ...]
    progress: Progress

    @property
    def roles(self) -> dict[str, list[Examined]]:
        """The variants of each model."""
        found: dict[str, list[Examined]] = {}
        for each in self.variants:
            found.setdefault(each.role, []).append(each)
        return found


def open_subject(path: Path, progress: Progress) -> Subject:
    """Raises ModelFileError for a manifest or a header that is not valid, UsageError for what is
    none of the three."""
    if is_pair(path):
        pair = read_pair(path)
        variants = tuple(
            Examined(role, variant.format, path / variant.path, variant)
            for role, member in pair.members()
            for variant in member.variants
        )
        return Subject(path, pair, variants, progress)
    if is_bundle(path):
        bundle = Examined(ROLES[0], read_manifest(path).format, path)
        return Subject(path, None, (bundle,), progress)
    if path.is_dir():
        raise UsageError(
            f"{path} is no bundle",
            remedy="Give a pair bundle, a bundle or a GGUF file; edge-spec export makes them.",
        )
    alone = Examined(ROLES[0], "gguf", path)
    alone.source  # noqa: B018 -- raises for a file that is none
    return Subject(path, None, (alone,), progress)
