"""Reads `hf:org/name[@revision][:file]`, asks the hub for that repository's files, and puts its
refusals into words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edge_spec.errors import DownloadError, UsageError
from edge_spec.models.bundle_files import is_below

PREFIX = "hf:"
DEFAULT_REVISION = "main"
_SHOWN = 200  # characters of what is no reference

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # of a repository's name; becomes a folder's name
_REFERENCE = re.compile(rf"hf:({_PART}/{_PART})(?:@([^:@]{{1,200}}))?(?::(.+))?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILES = 100_000
_LISTING_TIMEOUT_S = 30.0
# What huggingface_hub sends its requests with, by version, and the error that all others are.
_TRANSPORTS = (("requests", "RequestException"), ("httpx", "HTTPError"), ("httpx2", "HTTPError"))


@dataclass(frozen=True)
class HubReference:
    repository: str  # org/name
    revision: str = DEFAULT_REVISION  # a branch, tag or commit
    file: str | None = None  # one GGUF file of the repository; None: chosen

    @classmethod
    def parse(cls, model: str) -> HubReference:
        """Raises UsageError; so no part of a reference leads out of the folder it names."""
        match = _REFERENCE.fullmatch(model)
        if match is None or "--" in match[1] or ".." in match[1]:
            raise UsageError(
                f"{model[:_SHOWN]!r} names no model of the hub",
                remedy="Write hf:org/name, hf:org/name:file.gguf or hf:org/name@revision.",
            )
        repository, revision, file = match[1], match[2] or DEFAULT_REVISION, match[3]
        if not _REVISION.fullmatch(revision) or not is_below(revision):
            raise UsageError(
                f"{revision!r} is no revision", remedy="Give a branch, a tag or a commit after @."
            )
        if file is not None and not (is_below(file) and file.lower().endswith(".gguf")):
            raise UsageError(
                f"{file[:_SHOWN]!r} is not the name of a GGUF file",
                remedy=f"Name one, or write hf:{repository} for a model of safetensors.",
            )
        return cls(repository, revision, file)

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        file = "" if self.file is None else f":{self.file}"
        return f"{PREFIX}{self.repository}{revision}{file}"


def is_on_hub(model: str) -> bool:
    return model.startswith(PREFIX)


class UnreachableError(DownloadError):
    """The hub cannot be asked now; what the cache holds can still be used."""


@dataclass(frozen=True)
class RemoteFile:
    num_bytes: int
    digest: str  # the content's SHA-256 (64 digits), or Git's SHA-1 of a small file (40)

    @property
    def is_large(self) -> bool:
        """Says whether it is stored outside of Git, so that its SHA-256 is known."""
        return len(self.digest) == 64


@dataclass(frozen=True)
class RepositoryListing:
    commit: str
    files: Mapping[str, RemoteFile]  # by their names, "/" between folders


def library() -> Any:
    """huggingface_hub, imported with its telemetry off unless the user has set otherwise."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def list_files(reference: HubReference) -> RepositoryListing:
    """One request, with the user's token where there is one (HF_TOKEN, or a login's).

    Raises DownloadError; UnreachableError where the network or the hub fails.
    """
    hub = library()
    if hub.constants.HF_HUB_OFFLINE:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and HF_HUB_OFFLINE is set",
            remedy="Unset it, or pull the model while online.",
        )
    api = hub.HfApi(endpoint=hub.constants.ENDPOINT, library_name="edge-spec")
    with in_words(reference):
        try:
            info = api.model_info(
                reference.repository,
                revision=reference.revision,
                files_metadata=True,
                timeout=_LISTING_TIMEOUT_S,
            )
        except hub.errors.HfHubHTTPError:  # of some versions a ValueError, too
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _distrusted(reference, "its answer is no list of files") from None
    entries = info.siblings or []
    if not COMMIT.fullmatch(info.sha or "") or len(entries) > _MAX_FILES:
        raise _distrusted(reference, "its answer is no list of files")
    return RepositoryListing(
        info.sha, {entry.rfilename: _remote(reference, entry) for entry in entries}
    )


def _remote(reference: HubReference, entry: Any) -> RemoteFile:
    name = entry.rfilename
    if not is_below(name):
        raise _distrusted(reference, f"it lists a file outside of the repository, {name!r}")
    large = entry.lfs
    num_bytes, digest = (large.size, large.sha256) if large else (entry.size, entry.blob_id)
    known = isinstance(num_bytes, int) and num_bytes >= 0 and isinstance(digest, str)
    if not known or not (_SHA256 if large else COMMIT).fullmatch(digest):
        raise _distrusted(reference, f"it states no size and hash of {name!r}")
    return RemoteFile(num_bytes, digest)


def _distrusted(reference: HubReference, why: str) -> DownloadError:
    return DownloadError(
        f"what the hub says of {reference} cannot be used: {why}",
        remedy="Do not use this repository; where HF_ENDPOINT is set, check that server.",
    )


@contextmanager
def in_words(reference: HubReference) -> Iterator[None]:
    """Errors of huggingface_hub and of its transport become ours, with what to do."""
    hub = library()
    errors = hub.errors
    failures: tuple[type[Exception], ...] = (ConnectionError, TimeoutError, *_transport_errors())
    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _refused(reference, error, errors) from None
    except failures as error:
        raise UnreachableError(
            f"{reference} is not wholly in the cache, and {hub.constants.ENDPOINT} cannot be "
            f"reached: {str(error) or type(error).__name__}",
            remedy="Check the network and its proxy, then try again: what has arrived is kept.",
        ) from None


def _refused(reference: HubReference, error: Any, errors: Any) -> DownloadError:
    endpoint = library().constants.ENDPOINT
    page = f"{endpoint}/{reference.repository}"
    status = getattr(error.response, "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"hf:{reference.repository} is gated: its owner lets in only who has asked",
            remedy=f"Ask on {page}, then set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(
            f"hf:{reference.repository} has no revision {reference.revision!r}",
            remedy=f"Its branches and tags are listed on {page}.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"there is no model {reference.repository} on {endpoint}, or it is private",
            remedy="Check the name; for a private model set HF_TOKEN to a token that may read it.",
        )
    if status in (401, 403):
        return DownloadError(
            f"{endpoint} does not let this account read {reference} (status {status})",
            remedy="Check HF_TOKEN: it may have expired or lack the right to read this model.",
        )
    if status == 404:
        return DownloadError(
            f"{endpoint} lists a file of {reference} that it does not have",
            remedy="Try again; the repository may just have changed.",
        )
    return UnreachableError(
        f"{endpoint} could not answer for {reference} (status {status})",
        remedy="Try again later; what has arrived is kept.",
    )


def _transport_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of the transports that are loaded."""
    return tuple(
        getattr(sys.modules[module], name) for module, name in _TRANSPORTS if module in sys.modules
    )
