"""Everything that edge-spec raises on purpose. Each says what is wrong and where, and carries a
`remedy`: what the user can do about it."""

from __future__ import annotations

import re

_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # Python's stand-ins for such bytes
# Characters of a message, at its begin and end: a name within a file may be as long as the file.
_FIRST_SHOWN, _LAST_SHOWN = 1000, 500


def cut(text: str) -> str:
    """Its begin and its end, where it is longer than a person reads."""
    if len(text) <= _FIRST_SHOWN + _LAST_SHOWN:
        return text
    return f"{text[:_FIRST_SHOWN]} \u2026 {text[-_LAST_SHOWN:]}"


def readable(name: str) -> str:
    """Replaces the bytes of a name that are not UTF-8, which no JSON and no library takes."""
    return _NOT_UTF8.sub("\ufffd", name)


def _one_line(text: str) -> str:
    """Removes what a terminal could obey."""
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


class EdgeSpecError(Exception):
    """An error that a user can act on; `str()` is one line, the remedy included.

    Messages quote files of strangers: the line is of a sane length, and what a terminal could obey
    is not in it.
    """

    exit_status = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return _one_line(f"{self.shown}. {self.remedy}")

    @property
    def shown(self) -> str:
        """The message alone, fit to be shown as `str()` is."""
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
    """A model of an architecture that this reader does not know; another exporter may."""


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
    """A conversation's file is damaged, or of another model."""


class StorageError(EdgeSpecError, OSError):
    """A file cannot be written. errno: the system's number of what went wrong, where it has one."""

    def __init__(self, message: str, *, remedy: str, errno: int | None) -> None:
        super().__init__(message, remedy=remedy)
        self.errno, self.strerror = errno, message
