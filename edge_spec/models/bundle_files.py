"""The files that a bundle's manifest lists: where they may lie, their sizes and their hashes."""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from edge_spec.errors import BundleError
from edge_spec.storage.atomic import sha256_file
from edge_spec.storage.digests import known_sha256

EXPORT_AGAIN = "Delete the directory and export the model again."
_SHOWN = 200  # characters of a name in a message
# Windows opens these as devices, whatever the folder and the ending.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in "0123456789\u00b9\u00b2\u00b3"}
)
_FORBIDDEN = frozenset({"\\", ":", *map(chr, range(32))})


class FileEntry(BaseModel):
    """Holds what a manifest says of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_bytes: int = Field(ge=0)


def regular_size(path: Path) -> int:
    """Returns the size in bytes. Raises OSError for what is no file, nor a link to one: it may have
    no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return found.st_size


def list_files(directory: Path, start: Path) -> dict[str, FileEntry]:
    """The files at or below `start`, by their paths in `directory`, with sizes and hashes."""
    found = sorted(start.rglob("*")) if start.is_dir() else [start]
    named = {file.relative_to(directory).as_posix(): file for file in found if not file.is_dir()}
    return {
        name: FileEntry(sha256=sha256_file(file), num_bytes=file.stat().st_size)
        for name, file in named.items()
    }


def check_file(directory: Path, name: str, entry: FileEntry) -> None:
    """Raises BundleError unless it is below the directory, no link, and what `entry` says."""
    check_size(directory, name, entry)
    file = directory / name
    if known_sha256(file) != entry.sha256:
        raise BundleError(f"{file} does not match the sha256 in its manifest", remedy=EXPORT_AGAIN)


def check_size(directory: Path, name: str, entry: FileEntry) -> None:
    """Checks a file as `check_file` does, without reading it: its content may be another."""
    if not is_below(name):
        raise BundleError(
            f"{directory} lists a file outside itself: {_shown(name)}", remedy=EXPORT_AGAIN
        )
    file = directory / name
    links = any(part.is_symlink() for part in (file, *file.parents[: name.count("/")]))
    if links or not file.is_file():
        raise BundleError(f"{file} is missing", remedy=EXPORT_AGAIN)
    size = file.stat().st_size
    if size != entry.num_bytes:
        raise BundleError(
            f"{file} has {size} bytes, expected {entry.num_bytes}", remedy=EXPORT_AGAIN
        )


def _shown(name: str) -> str:
    """Cut, and on one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_SHOWN])


def is_below(name: str) -> bool:
    """Says whether it is a plain relative path on every system: no root, drive, device or step
    upwards, and nothing that a system would read as another name."""
    return all(
        part
        and part[-1] not in ". "  # Windows leaves them out
        and _FORBIDDEN.isdisjoint(part)
        and part.partition(".")[0].rstrip(" ").lower() not in _DEVICES
        for part in name.split("/")
    )
