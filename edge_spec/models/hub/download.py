"""Finds models in huggingface_hub's cache, and fetches them into it: files are checked before they
appear, and resumed after an interrupt.

models--org--name/blobs/DIGEST             a file's content
models--org--name/snapshots/COMMIT/FILE    a link to it
models--org--name/refs/REVISION            the commit that a branch or tag was last seen at
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from edge_spec.core.model import Progress
from edge_spec.errors import (
    DownloadError,
    EdgeSpecError,
    StorageError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.models import runtimes
from edge_spec.models.hub.client import (
    COMMIT,
    CONFIG,
    TOKENIZER,
    ChosenFiles,
    HubReference,
    RemoteFile,
    RepositoryListing,
    UnreachableError,
    choose,
    in_words,
    library,
    list_files,
)
from edge_spec.storage.atomic import as_storage_error, atomic_file, locked, sha256_file, sync

_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_SMALL_BYTES = 100_000_000  # of a file that is no weights: several times what any has
MAX_FILE_BYTES = 50_000_000_000  # the hub hands out no larger one over plain HTTP
_MAKE_ROOM = "Free space, or set HF_HUB_CACHE to a directory on another disk."
_FETCHED_AFTER_S = 6 * 3600.0  # of another process that fetches the same
_WEIGHTS = (".gguf", ".safetensors")
_log = logging.getLogger(__name__)


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


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def require_sane(reference: HubReference, files: Mapping[str, RemoteFile]) -> None:
    """Raises UsageError for a size that no such file has, before anything is fetched."""
    for name, file in files.items():
        limit = MAX_FILE_BYTES if name.lower().endswith(_WEIGHTS) else MAX_SMALL_BYTES
        if file.num_bytes > limit:
            raise UsageError(
                f"{name} of {reference} has {format_size(file.num_bytes)}, and at most "
                f"{format_size(limit)} are fetched",
                remedy="Choose another file or repository.",
            )


def fetch_blobs(
    reference: HubReference, listing: RepositoryListing, names: list[str], say: Progress
) -> None:
    """The contents of these files, each whole and with the hash that the hub states, or not there.

    An interrupt leaves what has arrived of large files, with which the next call goes on.
    Raises DownloadError.
    """
    store = _Store(reference, listing.commit)
    missing = {
        name: listing.files[name] for name in names if not store.has(name, listing.files[name])
    }
    if not missing:
        return
    total = sum(file.num_bytes for file in missing.values())
    there = sum(store.num_arrived(file) for file in missing.values())
    root, size = cache_root(), format_size(total - there)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < total - there:
        raise DownloadError(
            f"{size} are to be fetched, and {root} has {format_size(free)} free", remedy=_MAKE_ROOM
        )
    what = f"Downloading {reference}, {size}"
    say(what, there / max(total, 1))
    before = 0  # of the files so far
    for name, file in missing.items():
        store.fetch(name, file, _part(say, what, before, total))
        before += file.num_bytes
    say(what, 1.0)


def _part(say: Progress, what: str, before: int, total: int) -> Callable[[int], None]:
    return lambda arrived: say(what, (before + arrived) / total)


@dataclass(frozen=True)
class _Store:
    reference: HubReference
    commit: str

    def blob(self, file: RemoteFile) -> Path:
        return folder(self.reference) / "blobs" / file.digest

    def has(self, name: str, file: RemoteFile) -> bool:
        """Says whether it is here, as a blob or, where the system makes no links, as the file
        itself."""
        linked = folder(self.reference) / "snapshots" / self.commit / name
        return file.num_bytes in (_size(self.blob(file)), _size(linked))

    def num_arrived(self, file: RemoteFile) -> int:
        """Returns the bytes that a download can go on with; a small file may be sent compressed,
        and has none."""
        size = _size(self._partial(file)) or 0
        return size if file.is_large and size <= file.num_bytes else 0

    def fetch(self, name: str, file: RemoteFile, say: Callable[[int], None]) -> None:
        """Fetches a file unless it is here. say: is called with the number of bytes that have
        arrived. Raises DownloadError."""
        blob, partial = self.blob(file), self._partial(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(file):
            if self.has(name, file):  # another process has fetched it meanwhile
                return
            if not self.num_arrived(file):
                partial.unlink(missing_ok=True)
            try:
                with as_storage_error(blob.with_name(name)), partial.open("ab") as out:
                    self._receive(name, file, _Counted(out, file.num_bytes, say))
                    out.flush()
                    os.fsync(out.fileno())
            except StorageError as error:
                raise DownloadError(error.message, remedy=_MAKE_ROOM) from error
            if _digest(partial, file) != file.digest:
                partial.unlink()
                raise DownloadError(
                    f"{name} of {self.reference} arrived with another content than the hub states "
                    "(its hash differs) and was removed",
                    remedy="Try again; if it stays so, a proxy or mirror on the way changes files.",
                )
            partial.replace(blob)
            sync(blob.parent)

    def _receive(self, name: str, file: RemoteFile, out: _Counted) -> None:
        """Goes on after a cut connection for as long as each brings something."""
        while True:
            before = out.tell()
            try:
                return self._request(name, file, out)
            except UnreachableError:
                if out.tell() == before or not file.is_large:
                    raise

    def _request(self, name: str, file: RemoteFile, out: _Counted) -> None:
        hub = library()
        where = f"{self.reference.repository}/resolve/{self.commit}/{quote(name)}"
        headers = hub.utils.build_hf_headers(
            library_name="edge-spec", library_version=version("edge-spec")
        )
        try:
            with in_words(self.reference), _without_bars():
                hub.file_download.http_get(
                    f"{hub.constants.ENDPOINT}/{where}",
                    out,
                    resume_size=out.tell(),
                    headers=headers,
                    expected_size=file.num_bytes,
                )
        except OSError as error:
            if error.errno is not None:
                raise
            # _Counted's, or huggingface_hub's own for fewer bytes than expected.
            raise DownloadError(
                f"{name} of {self.reference} arrived with another size than the hub states",
                remedy="Try again; if it stays so, a proxy or mirror on the way changes files.",
            ) from None

    def _partial(self, file: RemoteFile) -> Path:
        """Returns where an unfinished download is, which is where older versions of huggingface_hub
        keep it, too."""
        return self.blob(file).with_name(f"{file.digest}.incomplete")

    @contextmanager
    def _lock(self, file: RemoteFile) -> Iterator[None]:
        """Holds the one that huggingface_hub takes, if the file system has locks: else the hash
        tells whether two have written at once."""
        path = cache_root() / ".locks" / folder(self.reference).name / file.digest
        what = "waiting for another process that fetches %s"
        waits = partial(_log.warning, what, self.reference)
        with ExitStack() as held:
            try:
                held.enter_context(locked(path, _FETCHED_AFTER_S, waits))
            except TimeoutError:
                raise DownloadError(
                    f"another process has been fetching {self.reference} for hours",
                    remedy="End it, and try again.",
                ) from None
            yield


class _Counted:
    """A file that tells how far it has grown, and grows no further than it should."""

    def __init__(self, file: BinaryIO, num_bytes: int, say: Callable[[int], None]) -> None:
        self._file, self._num_bytes, self._say = file, num_bytes, say

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._num_bytes:
            raise OSError(f"more than {self._num_bytes} bytes")
        written = self._file.write(data)
        self._say(self._file.tell())
        return written

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def truncate(self) -> int:
        return self._file.truncate()


@contextmanager
def _without_bars() -> Iterator[None]:
    """huggingface_hub would draw a bar of its own beside ours."""
    utils = library().utils
    name = "huggingface_hub.http_get"
    if utils.are_progress_bars_disabled(name):
        yield
        return
    utils.disable_progress_bars(name)
    try:
        yield
    finally:
        utils.enable_progress_bars(name)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _digest(path: Path, file: RemoteFile) -> str:
    if file.is_large:
        return sha256_file(path)
    content = path.read_bytes()  # as Git hashes it
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def pull(reference: HubReference, progress: Progress) -> HubModel:
    """The model as the hub has it now; where the hub cannot be reached, as the cache has it, which
    one line says.

    Raises DownloadError, UsageError where it is not clear which file is meant, and
    UnsupportedModelError for a repository without one that can be read.
    """
    try:
        listing = list_files(reference)
    except UnreachableError as error:
        cached = find_cached(reference)
        if cached is None:
            raise
        _log.warning("%s is opened as the cache has it: the hub was not asked", reference)
        _log.debug("%s", error)
        return cached
    choice = choose(reference, listing.files)
    require_sane(reference, {name: listing.files[name] for name in choice.names})
    if choice.has_to_be_head:
        fetch_blobs(reference, listing, [CONFIG], progress)
        if not runtimes.says_head(folder(reference) / "blobs" / listing.files[CONFIG].digest):
            raise UnsupportedModelError(
                f"{reference} has no {TOKENIZER}",
                remedy="Choose a repository that has one, or a GGUF file of the model.",
            )
    # Descriptions first: small, and without permission they fail before the weights.
    fetch_blobs(reference, listing, list(choice.names), progress)
    snapshot = folder(reference) / "snapshots" / listing.commit
    # A directory without its config.json is no model: it comes last.
    for name in sorted(choice.names, key=lambda name: name == CONFIG):
        link(folder(reference) / "blobs" / listing.files[name].digest, snapshot / name)
    remember(reference, listing.commit)
    return HubModel(reference, listing.commit, snapshot, choice)
