"""Everything that edge-spec raises on purpose.

    EdgeSpecError
    ├── UsageError               the request itself is wrong (exit status 2)
    │   └── ContextFullError     the prompt does not fit the model's context
    ├── ModelFileError           a model file is missing, truncated or corrupt
    │   └── BundleError          a bundle's manifest or one of its files is
    ├── UnsupportedModelError    a valid file that this version cannot run
    │   └── UnknownArchitectureError  another exporter may know it
    ├── ExportError              an export failed or missed its quality bound
    ├── DownloadError            a model could not be fetched
    ├── MissingDependencyError   an optional library is not installed
    ├── DeviceError              a device or a server cannot be used
    │   └── DeviceMemoryError    it has too little memory for the model or its cache
    ├── SessionError             a runtime failed while scoring
    │   └── HungError            a pass did not end in its time
    ├── SnapshotError            a conversation's file is damaged, or of another model
    └── StorageError             a file cannot be written (an OSError, too)

Each says what is wrong and where, and carries a `remedy`: what the user can do about it.
"""

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
    exit_status = 2


class ContextFullError(UsageError):
    pass


class ModelFileError(EdgeSpecError):
    pass


class BundleError(ModelFileError):
    pass


class UnsupportedModelError(EdgeSpecError):
    pass


class UnknownArchitectureError(UnsupportedModelError):
    pass


class ExportError(EdgeSpecError):
    pass


class DownloadError(EdgeSpecError):
    pass


class MissingDependencyError(EdgeSpecError):
    pass


class DeviceError(EdgeSpecError):
    pass


class DeviceMemoryError(DeviceError):
    pass


class SessionError(EdgeSpecError):
    pass


class HungError(SessionError):
    pass


class SnapshotError(EdgeSpecError):
    pass


class StorageError(EdgeSpecError, OSError):
    """errno: the system's number of what went wrong, where it has one."""

    def __init__(self, message: str, *, remedy: str, errno: int | None) -> None:
        super().__init__(message, remedy=remedy)
        self.errno, self.strerror = errno, message
