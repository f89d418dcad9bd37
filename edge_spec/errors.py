"""Errors that edge-spec raises on purpose: each says what is wrong and where, and its `remedy`."""

from __future__ import annotations

import re

_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # Python's stand-ins for bytes that are not UTF-8
# Characters kept of a message: a name in a file may be as long as the file.
_FIRST_SHOWN, _LAST_SHOWN = 1000, 500


def cut(text: str) -> str:
    """Cut the middle out of an overlong message."""
    if len(text) <= _FIRST_SHOWN + _LAST_SHOWN:
        return text
    return f"{text[:_FIRST_SHOWN]} \u2026 {text[-_LAST_SHOWN:]}"


def readable(name: str) -> str:
    """Replace bytes of a name that are not UTF-8: JSON and libraries reject them."""
    return _NOT_UTF8.sub("\ufffd", name)


def install(extra: str) -> str:
    """Return how to add an extra: from a checkout, as no package index has edge-spec."""
    return f'Run in your checkout of edge-spec: pip install -e ".[{extra}]"'


def _one_line(text: str) -> str:
    """Remove control characters, which a terminal could obey."""
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


class EdgeSpecError(Exception):
    """An error that a user can act on; `str()` is one line with the remedy, bounded and free of
    control characters, because messages quote untrusted files."""

    exit_status = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return _one_line(f"{self.shown}. {self.remedy}")

    @property
    def shown(self) -> str:
        """The message without its remedy, as safe to print as `str()`."""
        return _one_line(cut(self.message))


class UsageError(EdgeSpecError):
    """The request itself is wrong."""

    exit_status = 2


class ContextFullError(UsageError):
    """The prompt does not fit the model's context."""


class ModelFileError(EdgeSpecError):
    """A model file is missing, truncated or corrupt."""


class BundleError(ModelFileError):
    """A bundle's manifest or one of its files is missing, truncated or corrupt."""


class UnsupportedModelError(EdgeSpecError):
    """A valid file that this version cannot run."""


class UnknownArchitectureError(UnsupportedModelError):
    """An architecture that this reader does not know; another exporter may."""


class ExportError(EdgeSpecError):
    """An export failed or missed its quality bound."""


class DownloadError(EdgeSpecError):
    """A model could not be fetched."""


class MissingDependencyError(EdgeSpecError):
    """An optional library is not installed."""


class DeviceError(EdgeSpecError):
    """A device or a server cannot be used."""


class DeviceMemoryError(DeviceError):
    """A device has too little memory for the model or its cache."""


class SessionError(EdgeSpecError):
    """A runtime failed while scoring."""


class HungError(SessionError):
    """A pass did not end in its time."""


class SnapshotError(EdgeSpecError):
    """A conversation's file is damaged, or belongs to another model."""


class StorageError(EdgeSpecError, OSError):
    """A file cannot be written. errno: the system's error number, if there is one."""

    def __init__(self, message: str, *, remedy: str, errno: int | None) -> None:
        super().__init__(message, remedy=remedy)
        self.errno, self.strerror = errno, message
