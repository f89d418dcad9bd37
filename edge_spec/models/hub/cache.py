"""Finds models in huggingface_hub's cache, and puts files into it.

models--org--name/blobs/DIGEST             a file's content
models--org--name/snapshots/COMMIT/FILE    a link to it
models--org--name/refs/REVISION            the commit that a branch or tag was last seen at
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.models.hub.choosing import CONFIG, ChosenFiles, choose
from edge_spec.models.hub.client import COMMIT, HubReference, library
from edge_spec.storage.atomic import atomic_file, sha256_file

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubModel:
    """A model whose files are all in the cache."""

    reference: HubReference
    commit: str
    snapshot: Path
    choice: ChosenFiles

    @property
    def path(self) -> Path:
        """The GGUF file, or the directory."""
        return self.snapshot / self.choice.names[0] if self.choice.is_gguf else self.snapshot

    @property
    def name(self) -> str:
        return self.path.stem if self.choice.is_gguf else self.reference.name

    @property
    def files(self) -> dict[str, Path]:
        return {name: self.snapshot / name for name in self.choice.names}

    @cached_property
    def identity(self) -> str:
        """Changes with the files' content, not with the revision they were asked by.

        Where the cache has no links, it changes with the commit, too.
        """
        contents = [
            (name, path.resolve().name if path.is_symlink() else self.commit)
            for name, path in sorted(self.files.items())
        ]
        return hashlib.sha256(repr(contents).encode()).hexdigest()


def cache_root() -> Path:
    """HF_HUB_CACHE, else in HF_HOME, else ~/.cache/huggingface/hub."""
    return Path(library().constants.HF_HUB_CACHE)


def folder(reference: HubReference) -> Path:
    return cache_root() / f"models--{reference.repository.replace('/', '--')}"


def find_cached(reference: HubReference) -> HubModel | None:
    """Returns the model if the cache alone has all of its files, else None."""
    commit = _commit(reference)
    snapshot = folder(reference) / "snapshots" / (commit or "")
    if commit is None or not snapshot.is_dir():
        return None
    names = [
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()
    ]
    try:
        choice = choose(reference, names)
    except EdgeSpecError:  # not all of it is here
        return None
    if choice.has_to_be_head and not runtimes.says_head(snapshot / CONFIG):
        return None
    return HubModel(reference, commit, snapshot, choice)


def list_cached() -> list[HubModel]:
    """All models in the cache that can be read, by the branches and tags they are known by."""
    found = []
    for ref in sorted(cache_root().glob("models--*--*/refs/*")):
        _, org, name = ref.parent.parent.name.split("--", 2)
        model = find_cached(HubReference(f"{org}/{name}", ref.name))
        if model is not None:
            found.append(model)
    return found


def _commit(reference: HubReference) -> str | None:
    if COMMIT.fullmatch(reference.revision):
        return reference.revision
    ref = folder(reference) / "refs" / reference.revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    return commit if COMMIT.fullmatch(commit) else None


def link(blob: Path, file: Path) -> None:
    """The blob appears as `file`; where the system makes no links, it is moved there."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # a link that leads nowhere
    try:
        file.symlink_to(os.path.relpath(blob, file.parent))
    except FileExistsError:  # another process has linked it meanwhile
        pass
    except OSError:
        blob.replace(file)


def remember(reference: HubReference, commit: str) -> None:
    """Notes the commit that a branch or tag stands for, for use without the network."""
    if COMMIT.fullmatch(reference.revision):
        return
    with atomic_file(folder(reference) / "refs" / reference.revision) as file:
        file.write_text(commit, encoding="utf-8")


def content_sha256(path: Path) -> str:
    """Hashes a file in the cache, whose content's name may be it already."""
    name = path.resolve().name
    return name if _SHA256.fullmatch(name) else sha256_file(path)
