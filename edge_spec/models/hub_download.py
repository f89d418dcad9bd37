"""List, download and find models of the Hugging Face hub.

Files are shared with other programs in huggingface_hub's cache, in its documented layout:

    models--org--name/blobs/DIGEST             a file's content
    models--org--name/snapshots/COMMIT/FILE    a link to it
    models--org--name/refs/REVISION            the commit that a branch or tag was last seen at

The library makes the requests, but not with `hf_hub_download`, which returns cached files without
comparing their hash and, in newer versions, restarts interrupted downloads.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
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
from edge_spec.models.bundle import is_below
from edge_spec.models.devices import format_bytes
from edge_spec.models.hub import (
    CONFIG,
    TOKENIZER,
    HubReference,
    choose,
    has_to_be_head,
    is_gguf,
)
from edge_spec.storage.atomic import as_storage_error, atomic_file, locked, sha256_file, sync

MAX_SMALL_BYTES = 100_000_000  # of a file other than weights, several times any real one
MAX_FILE_BYTES = 50_000_000_000  # the hub serves no larger file over plain HTTP
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILES = 100_000
_LISTING_TIMEOUT_S = 30.0
# Transports of huggingface_hub's versions, and the base of their errors.
_TRANSPORTS = (("requests", "RequestException"), ("httpx", "HTTPError"), ("httpx2", "HTTPError"))
_WEIGHTS = (".gguf", ".safetensors")
_MAKE_ROOM = "Free space, or set HF_HUB_CACHE to a directory on another disk."
_CHANGED = "Try again; if it stays so, a proxy or mirror on the way changes files."
_log = logging.getLogger(__name__)


class UnreachableError(DownloadError):
    """The hub cannot be reached now; the cache still can."""


@dataclass(frozen=True)
class RemoteFile:
    num_bytes: int
    digest: str  # SHA-256 of the content (64 digits), or Git's SHA-1 of a small file (40)

    @property
    def is_large(self) -> bool:
        """Return whether it is stored outside Git, with a known SHA-256."""
        return len(self.digest) == 64


Files = Mapping[str, RemoteFile]  # by name, with "/" between folders


def library() -> Any:
    """Import huggingface_hub, its telemetry off unless the user set it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def list_files(reference: HubReference) -> tuple[str, Files]:
    """Return a repository's commit and files, in one request with the user's token (HF_TOKEN or a
    login's). Raises DownloadError; UnreachableError if network or hub fail."""
    hub = library()
    if hub.constants.HF_HUB_OFFLINE:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and HF_HUB_OFFLINE is set",
            remedy="Unset it, or pull the model while online.",
        )
    api = hub.HfApi(endpoint=hub.constants.ENDPOINT, library_name="edge-spec")
    with _explained(reference):
        try:
            info = api.model_info(
                reference.repository,
                revision=reference.revision,
                files_metadata=True,
                timeout=_LISTING_TIMEOUT_S,
            )
        except hub.errors.HfHubHTTPError:  # in some versions also a ValueError
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _distrust(reference, "its answer is no list of files") from None
    entries = info.siblings or []
    if not _COMMIT.fullmatch(info.sha or "") or len(entries) > _MAX_FILES:
        raise _distrust(reference, "its answer is no list of files")
    return info.sha, {entry.rfilename: _parse_entry(reference, entry) for entry in entries}


def _parse_entry(reference: HubReference, entry: Any) -> RemoteFile:
    name = entry.rfilename
    if not is_below(name):
        raise _distrust(reference, f"it lists a file outside of the repository, {name!r}")
    large = entry.lfs
    num_bytes, digest = (large.size, large.sha256) if large else (entry.size, entry.blob_id)
    is_known = isinstance(num_bytes, int) and num_bytes >= 0 and isinstance(digest, str)
    if not is_known or not (_SHA256 if large else _COMMIT).fullmatch(digest):
        raise _distrust(reference, f"it states no size and hash of {name!r}")
    return RemoteFile(num_bytes, digest)


def _distrust(reference: HubReference, why: str) -> DownloadError:
    return DownloadError(
        f"what the hub says of {reference} cannot be used: {why}",
        remedy="Do not use this repository; where HF_ENDPOINT is set, check that server.",
    )


@contextmanager
def _explained(reference: HubReference) -> Iterator[None]:
    hub = library()
    failures: list[type[Exception]] = [ConnectionError, TimeoutError]
    failures += [getattr(sys.modules[name], e) for name, e in _TRANSPORTS if name in sys.modules]
    try:
        yield
    except hub.errors.HfHubHTTPError as error:
        raise _explain(reference, error) from None
    except tuple(failures) as error:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and {hub.constants.ENDPOINT} cannot be "
            f"reached: {str(error) or type(error).__name__}",
            remedy="Check the network and its proxy, then try again: what has arrived is kept.",
        ) from None


def _explain(reference: HubReference, error: Any) -> DownloadError:
    hub = library()
    endpoint, errors, repository = hub.constants.ENDPOINT, hub.errors, reference.repository
    status = getattr(error.response, "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        what = f"hf:{repository} is gated: its owner lets in only who has asked"
        remedy = f"Ask on {endpoint}/{repository}, then set HF_TOKEN to a token of that account."
    elif isinstance(error, errors.RevisionNotFoundError):
        what = f"hf:{repository} has no revision {reference.revision!r}"
        remedy = f"Its branches and tags are listed on {endpoint}/{repository}."
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"there is no model {repository} on {endpoint}, or it is private"
        remedy = "Check the name; for a private model set HF_TOKEN to a token that may read it."
    elif status in (401, 403):
        what = f"{endpoint} does not let this account read {reference} (status {status})"
        remedy = "Check HF_TOKEN: it may have expired or lack the right to read this model."
    elif status == 404:
        what = f"{endpoint} lists a file of {reference} that it does not have"
        remedy = "Try again; the repository may just have changed."
    else:
        return UnreachableError(
            f"{endpoint} could not answer for {reference} (status {status})",
            remedy="Try again later; what has arrived is kept.",
        )
    return DownloadError(what, remedy=remedy)


@dataclass(frozen=True)
class HubModel:
    reference: HubReference
    commit: str
    snapshot: Path
    names: tuple[str, ...]  # of its files in the repository

    @property
    def path(self) -> Path:
        """The GGUF file, or the directory."""
        return self.snapshot / self.names[0] if is_gguf(self.names[0]) else self.snapshot

    @property
    def name(self) -> str:
        return self.path.stem if is_gguf(self.names[0]) else self.reference.name

    @property
    def files(self) -> dict[str, Path]:
        return {name: self.snapshot / name for name in self.names}

    @cached_property
    def identity(self) -> str:
        """Identify the files' content, whatever the revision; in a cache without links also the
        commit."""
        contents = [
            (name, path.resolve().name if path.is_symlink() else self.commit)
            for name, path in sorted(self.files.items())
        ]
        return hashlib.sha256(repr(contents).encode()).hexdigest()


def _cache_root() -> Path:
    return Path(library().constants.HF_HUB_CACHE)


def _folder(reference: HubReference) -> Path:
    return _cache_root() / f"models--{reference.repository.replace('/', '--')}"


def find_cached(reference: HubReference) -> HubModel | None:
    """Return the model if the cache has all files, else None."""
    commit, ref = reference.revision, _folder(reference) / "refs" / reference.revision
    if not _COMMIT.fullmatch(commit):
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    snapshot = _folder(reference) / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        return None
    files = (path for path in snapshot.rglob("*") if path.is_file())
    try:
        names = choose(reference, [path.relative_to(snapshot).as_posix() for path in files])
    except EdgeSpecError:  # incomplete
        return None
    if has_to_be_head(names) and not runtimes.says_head(snapshot / CONFIG):
        return None
    return HubModel(reference, commit, snapshot, names)


def list_cached() -> list[HubModel]:
    """Return all readable cached models, by branch and tag."""
    references = (
        HubReference("/".join(ref.parent.parent.name.split("--", 2)[1:]), ref.name)
        for ref in sorted(_cache_root().glob("models--*--*/refs/*"))
    )
    return [model for each in references if (model := find_cached(each)) is not None]


def pull(reference: HubReference, progress: Progress) -> HubModel:
    """Download the hub's current version; if the hub cannot be reached, log that and return the
    cached one. Raises DownloadError, UsageError for an unclear file, UnsupportedModelError if none
    is readable."""
    try:
        commit, listed = list_files(reference)
    except UnreachableError as error:
        cached = find_cached(reference)
        if cached is None:
            raise
        _log.warning("%s is opened as the cache has it: the hub was not asked", reference)
        _log.debug("%s", error)
        return cached
    names = choose(reference, listed)
    files = {name: listed[name] for name in names}
    check_sizes(reference, files)
    blobs, snapshot = _folder(reference) / "blobs", _folder(reference) / "snapshots" / commit
    if has_to_be_head(names):
        fetch_blobs(reference, commit, {CONFIG: files[CONFIG]}, progress)
        if not runtimes.says_head(blobs / files[CONFIG].digest):
            raise UnsupportedModelError(
                f"{reference} has no {TOKENIZER}",
                remedy="Choose a repository that has one, or a GGUF file of the model.",
            )
    # Small descriptions first: without permission they fail before the weights.
    fetch_blobs(reference, commit, files, progress)
    # Without config.json a directory is no model, so it comes last.
    for name in sorted(files, key=lambda name: name == CONFIG):
        _link(blobs / files[name].digest, snapshot / name)
    if not _COMMIT.fullmatch(reference.revision):  # for offline use
        with atomic_file(_folder(reference) / "refs" / reference.revision) as work:
            work.write_text(commit, encoding="utf-8")
    return HubModel(reference, commit, snapshot, names)


def check_sizes(reference: HubReference, files: Files) -> None:
    """Raise UsageError for an implausible size, before anything is fetched."""
    for name, file in files.items():
        limit = MAX_FILE_BYTES if name.lower().endswith(_WEIGHTS) else MAX_SMALL_BYTES
        if file.num_bytes > limit:
            raise UsageError(
                f"{name} of {reference} has {format_bytes(file.num_bytes)}, and at most "
                f"{format_bytes(limit)} are fetched",
                remedy="Choose another file or repository.",
            )


def fetch_blobs(reference: HubReference, commit: str, files: Files, say: Progress) -> None:
    """Fetch what is missing of these files, verified by the hub's hashes. Large files resume after
    an interrupt. Raises DownloadError."""
    downloads = [_Download(reference, commit, name, file) for name, file in files.items()]
    missing = [download for download in downloads if not download.is_here()]
    if not missing:
        return
    total = sum(each.file.num_bytes for each in missing)
    arrived = sum(each.num_arrived() for each in missing)
    root, size = _cache_root(), format_bytes(total - arrived)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < total - arrived:
        raise DownloadError(
            f"{size} are to be fetched, and {root} has {format_bytes(free)} free", remedy=_MAKE_ROOM
        )
    what = f"Downloading {reference}, {size}"
    say(what, arrived / max(total, 1))
    before = 0
    for each in missing:
        each.run(partial(_tell, say, what, before, total))
        before += each.file.num_bytes
    say(what, 1.0)


def _tell(say: Progress, what: str, before: int, total: int, arrived: int) -> None:
    say(what, (before + arrived) / total)


@dataclass(frozen=True)
class _Download:
    reference: HubReference
    commit: str
    name: str
    file: RemoteFile

    @cached_property
    def blob(self) -> Path:
        return _folder(self.reference) / "blobs" / self.file.digest

    @cached_property
    def partial(self) -> Path:
        """The name that older versions of huggingface_hub use, too."""
        return self.blob.with_name(f"{self.file.digest}.incomplete")

    def is_here(self) -> bool:
        """Return whether the cache has it, as a blob or, without links, in the snapshot."""
        linked = _folder(self.reference) / "snapshots" / self.commit / self.name
        return any(
            path.is_file() and path.stat().st_size == self.file.num_bytes
            for path in (self.blob, linked)
        )

    def num_arrived(self) -> int:
        """Return the bytes to resume from; 0 for small files, which may come compressed."""
        size = self.partial.stat().st_size if self.partial.is_file() else 0
        return size if self.file.is_large and size <= self.file.num_bytes else 0

    def run(self, say: Callable[[int], None]) -> None:
        """Fetch the file unless another process did. say: receives the bytes so far. Raises
        DownloadError."""
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        # huggingface_hub's lock; without one, the hash detects concurrent writes.
        lock = _folder(self.reference).parent / ".locks" / _folder(self.reference).name
        with locked(lock / self.file.digest, what=f"{self.name} of {self.reference}"):
            if self.is_here():
                return
            if not self.num_arrived():
                self.partial.unlink(missing_ok=True)
            try:
                with (
                    as_storage_error(self.blob.with_name(self.name)),
                    _Bounded(self.partial, self.file.num_bytes, say) as out,
                ):
                    self._receive(out)
                    out.flush()
                    os.fsync(out.fileno())
            except StorageError as error:
                raise DownloadError(error.message, remedy=_MAKE_ROOM) from error
            if _digest(self.partial, self.file) != self.file.digest:
                self.partial.unlink()
                raise DownloadError(
                    f"{self.name} of {self.reference} arrived with another content than the hub "
                    "states (its hash differs) and was removed",
                    remedy=_CHANGED,
                )
            self.partial.replace(self.blob)
            sync(self.blob.parent)

    def _receive(self, out: _Bounded) -> None:
        hub, where = library(), f"{self.reference.repository}/resolve/{self.commit}"
        headers = hub.utils.build_hf_headers(
            library_name="edge-spec", library_version=version("edge-spec")
        )
        while True:
            before = out.tell()
            try:
                with _explained(self.reference), _without_bars():
                    hub.file_download.http_get(
                        f"{hub.constants.ENDPOINT}/{where}/{quote(self.name)}",
                        out,
                        resume_size=before,
                        headers=headers,
                        expected_size=self.file.num_bytes,
                    )
                return
            # not all versions of huggingface_hub resume a broken connection
            except UnreachableError:
                if out.tell() == before or not self.file.is_large:
                    raise
            except OSError as error:
                if error.errno is not None:
                    raise
                # _Bounded's, or huggingface_hub's for fewer bytes than expected.
                raise DownloadError(
                    f"{self.name} of {self.reference} arrived with another size than the hub "
                    "states",
                    remedy=_CHANGED,
                ) from None


class _Bounded(io.BufferedWriter):
    """A file that reports its growth and stops at its expected size."""

    def __init__(self, path: Path, num_bytes: int, say: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._num_bytes, self._say = num_bytes, say

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._num_bytes:
            raise OSError(f"more than {self._num_bytes} bytes")
        written = super().write(data)
        self._say(self.tell())
        return written


@contextmanager
def _without_bars() -> Iterator[None]:
    utils, name = library().utils, "huggingface_hub.http_get"
    was_on = not utils.are_progress_bars_disabled(name)
    if was_on:
        utils.disable_progress_bars(name)
    try:
        yield
    finally:
        if was_on:
            utils.enable_progress_bars(name)


def _digest(path: Path, file: RemoteFile) -> str:
    if file.is_large:
        return sha256_file(path)
    content = path.read_bytes()  # Git's hash
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _link(blob: Path, file: Path) -> None:
    """Link the blob as `file`; on systems without links, move it there."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # a dangling link
    try:
        file.symlink_to(os.path.relpath(blob, file.parent))
    except FileExistsError:  # another process made it meanwhile
        pass
    except OSError:
        blob.replace(file)
