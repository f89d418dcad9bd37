"""Checks that what edge-spec keeps can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edge_spec.diagnostics.doctor.finding import Finding, note, ok, warning
from edge_spec.drafters.lookup.answers import check_answers
from edge_spec.engine.snapshot_file import check_beginning
from edge_spec.errors import EdgeSpecError, ModelFileError
from edge_spec.fitting.memory import format_bytes
from edge_spec.models.bundle import is_bundle, open_unhashed
from edge_spec.models.model_text import SUFFIX, read_kept_tokenizer
from edge_spec.models.pair_history import check_history
from edge_spec.placement.plan import read_plan
from edge_spec.placement.profile import read_key
from edge_spec.placement.row_findings import read_rows
from edge_spec.storage.digests import check_digests

_SHOWN = 3
_GGUF = b"GGUF"
_NAMED_BYTES = 1_000_000  # less is not worth telling
_REMEDY = "Delete it: it is made again where it is needed."


class Kind(NamedTuple):
    directory: str
    pattern: str
    check: Callable[[Path], object]  # raises EdgeSpecError, OSError


def _check_conversion(path: Path) -> None:
    if is_bundle(path):
        open_unhashed(path)
        return
    with path.open("rb") as file:  # the header of a GGUF file takes most of a second to read
        if file.read(len(_GGUF)) != _GGUF:
            raise ModelFileError(f"{path} is no bundle and no GGUF file", remedy=_REMEDY)


KINDS = (
    Kind("bundles", "[!.]*", _check_conversion),
    Kind("tokenizers", f"*{SUFFIX}", read_kept_tokenizer),
    Kind("prompts", "[!.]*", check_beginning),
    Kind("profiles", "*.json", read_key),
    Kind("rows", "*.json", read_rows),
    Kind("digests", "*.json", check_digests),
    Kind("plans", "*.json", read_plan),
    Kind("pairs", "*.json", check_history),
    Kind("answers", "*.json", check_answers),
)


def check_caches(cache: Path) -> Iterator[Finding]:
    """Changes nothing. Conversions are not hashed: opening one does."""
    counts, problems = [], []
    for kind in KINDS:
        found = [
            path
            for path in sorted((cache / kind.directory).glob(kind.pattern))
            if not path.name.startswith(".") and path.suffix not in (".lock", ".sha256")
        ]
        size = sum(map(_num_bytes, found))
        total = f" ({format_bytes(size)})" if size >= _NAMED_BYTES else ""
        counts.append(f"{kind.directory} {len(found)}{total}")
        problems += [(path, why) for path in found if (why := _problem(kind, path)) is not None]
    for path, why in problems[:_SHOWN]:
        yield warning(path.parent.name, f"{path.name}: {why}", _REMEDY)
    if len(problems) > _SHOWN:
        yield warning("kept", f"{len(problems) - _SHOWN} more cannot be read", "Delete them.")
    kinds = ("models", "conversions", *(kind.directory for kind in KINDS))
    # What a kill left, also of an older version's conversions.
    left = [path for kind in kinds for path in (cache / kind).glob(".*.part")]
    if left:
        size = sum(map(_num_bytes, left))
        yield note(
            "leftovers",
            f"{len(left)} of work that was interrupted, or goes on, {format_bytes(size)}",
            f"Delete {cache}/*/.*.part while edge-spec does not run.",
        )
    if not problems:
        yield ok("kept", ", ".join(counts))


def _problem(kind: Kind, path: Path) -> str | None:
    try:
        kind.check(path)
    except EdgeSpecError as error:
        return error.shown.removeprefix(f"{path} ")
    except OSError as error:
        return str(error.strerror or error)
    return None


def _num_bytes(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # whose work has ended meanwhile
            size += file.lstat().st_size
    return size
