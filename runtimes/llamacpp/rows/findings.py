"""What was found of builds of llama.cpp: whether the plugin computes right in them.

A build is what its files hash to, with our own library and the kernels that this processor gets.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated
from edge_spec.storage.atomic import cache_directory, sha256_file
from edge_spec.storage.json_store import KeptFile

_MAX_KEPT = 20
_TIMEOUT_S = 20.0  # a hundred times what it takes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """key: of the build; reason: why the plugin stays out, None where it computes right."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    reason: Annotated[str, Field(max_length=2000)] | None


@dataclass(frozen=True)
class _File:
    version: Literal[1]
    builds: Annotated[tuple[Build, ...], Field(max_length=_MAX_KEPT)]  # the latest last


_FILE = TypeAdapter(_File)


def build_key(files: Sequence[Path], table: str) -> str:
    """Raises OSError."""
    hashes = [sha256_file(file) for file in files]
    return hashlib.sha256("\n".join([*hashes, table]).encode()).hexdigest()


def fault(key: str, ggml: Path) -> str | None:
    """Why the plugin does not fit this build, None where it does; tried once, in a process of its
    own. ggml: the library that is opened there."""
    kept = KeptFile(cache_directory() / "kernels" / "builds.json", _FILE)
    known = kept.read()
    for build in known.builds if known is not None else ():
        if build.key == key:
            return build.reason
    reason, lasts = _tried(ggml)
    if lasts:
        kept.keep(lambda old: _with(old, Build(key, reason)))
    return reason


def _tried(ggml: Path) -> tuple[str | None, bool]:
    """The reason, and whether it would be the same the next time."""
    from edge_spec.runtimes.llamacpp.rows.self_test import run

    try:
        isolated(run, str(ggml), timeout_s=_TIMEOUT_S)
    except NoAnswerError as error:  # of a machine that is busy, perhaps
        return f"its test did not end: {error}", False
    except IsolatedError as error:
        return f"its test failed: {error}", True
    return None, True


def _with(old: _File | None, build: Build) -> _File:
    if old is None:
        return _File(1, (build,))
    others = [other for other in old.builds if other.key != build.key]
    return replace(old, builds=(*others[-_MAX_KEPT + 1 :], build))
