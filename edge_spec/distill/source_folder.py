"""The functions in a user's folder of source files, in any language."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edge_spec.distill.source_functions import (
    LEAST_LINES,
    MOST_LINES,
    SourceFunction,
    functions_of,
)
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import expanded

MAX_FILE_BYTES = 1 << 20  # larger ones are made by programs
MAX_BYTES = 64 << 20  # of all files that are read
_MAX_FILES = 100_000
_PROBED_BYTES = 4096
_WHAT = "Give a directory of source files, or one."
_OF_OTHERS = frozenset({"node_modules", "site-packages", "__pycache__"})
_LANGUAGES = {
    **{".py": "python", ".pyi": "python", ".js": "javascript", ".mjs": "javascript"},
    **{".jsx": "jsx", ".ts": "typescript", ".tsx": "tsx", ".java": "java", ".kt": "kotlin"},
    **{".c": "c", ".h": "c", ".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp", ".hpp": "cpp"},
    **{".cs": "csharp", ".go": "go", ".rs": "rust", ".rb": "ruby", ".php": "php"},
    **{".swift": "swift", ".scala": "scala", ".dart": "dart", ".lua": "lua", ".jl": "julia"},
    **{".r": "r", ".pl": "perl", ".pm": "perl", ".sh": "bash", ".bash": "bash", ".sql": "sql"},
    **{
        ".ex": "elixir",
        ".exs": "elixir",
        ".clj": "clojure",
        ".zig": "zig",
        ".m": "objectivec",
        ".vb": "vb",
    },
}
_NO_SOURCE = frozenset(
    {
        *(".md", ".rst", ".txt", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml"),
        *(".ini", ".cfg", ".xml", ".svg", ".html", ".css", ".lock", ".log", ".po", ".ipynb"),
    }
)
_log = logging.getLogger(__name__)


@dataclass
class _Read:
    num_files: int = 0
    num_left_out: int = 0
    num_bytes: int = 0
    functions: dict[SourceFunction, None] = field(default_factory=dict)


def folder_functions(folder: Path) -> tuple[SourceFunction, ...]:
    """Returns the functions of all source files below a folder, or of one file, in the order of
    their paths. Hidden files, links, files that are binary or large, and libraries of others that
    package managers put there are left out; of very many files some are read, the same each time.

    Raises UsageError where there is no such folder, or no function in it.
    """
    folder = expanded(folder)
    read = _Read()
    try:
        found = [folder] if folder.is_file() else _chosen(folder)
        if not folder.exists():
            raise UsageError(f"no such file or directory: {folder}", remedy=_WHAT)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error}", remedy=_WHAT) from None
    for path in found:
        _read_file(path, read)
    if not read.functions:
        looked_at = f"{read.num_files} source file{'' if read.num_files == 1 else 's'}"
        if read.num_left_out:
            looked_at += f", {read.num_left_out} binary, large or unreadable"
        raise UsageError(
            f"no function of {LEAST_LINES} to {MOST_LINES} lines was found in {folder} "
            f"({looked_at})",
            remedy=_WHAT,
        )
    return tuple(read.functions)


def _chosen(folder: Path) -> list[Path]:
    """Returns source files in the order of their paths, at most MAX_BYTES of them."""
    sizes: dict[Path, int] = {}
    for path in _files_below(folder):
        if len(sizes) == _MAX_FILES:
            _log.warning("%s has more than %d files: others are not read", folder, _MAX_FILES)
            break
        if path.suffix.lower() not in _NO_SOURCE:
            sizes[path] = min(path.stat().st_size, _PROBED_BYTES + MAX_FILE_BYTES)
    chosen, num_bytes = [], 0
    # A sample of all parts of a large folder, not its first part.
    for path in sorted(sizes, key=lambda path: _digest(path.relative_to(folder))):
        num_bytes += sizes[path] if sizes[path] <= MAX_FILE_BYTES else _PROBED_BYTES
        if num_bytes > MAX_BYTES:
            _log.warning("%s has more than %d MB: a part is read", folder, MAX_BYTES >> 20)
            break
        chosen.append(path)
    return sorted(chosen)


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _OF_OTHERS
        )
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _read_file(path: Path, read: _Read) -> None:
    text = _text(path)
    if text is None:
        read.num_left_out += 1
        return
    read.num_files += 1
    language = _LANGUAGES.get(path.suffix.lower(), "")
    found = (SourceFunction(code, language) for code in functions_of(text, language))
    read.functions.update(dict.fromkeys(found))


def _text(path: Path) -> str | None:
    """Returns None for a file that is binary, large or cannot be read. Encodings of former days are
    taken for Latin-1: but for some letters in comments, code is ASCII."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            content = file.read(_PROBED_BYTES)
            wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
            if b"\0" in content and not wide:
                return None
            content += file.read(MAX_FILE_BYTES)
    except OSError:
        return None
    if len(content) > MAX_FILE_BYTES:
        return None
    encodings = ("utf-16",) if wide else ("utf-8-sig", "latin-1")
    for encoding in encodings:
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file that fails where a read would wait, as some of the system's in /proc do."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _digest(path: Path) -> bytes:
    return hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).digest()
