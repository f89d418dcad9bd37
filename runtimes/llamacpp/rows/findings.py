"""What was found of builds of llama.cpp: whether the plugin computes right in them.

A build is what its files hash to, with our own library and the kernels that this processor gets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated
from edge_spec.storage.atomic import sha256_file
from edge_spec.storage.measurements import Quantity

_TIMEOUT_S = 20.0  # a hundred times what it takes

# By a build's key: why the plugin stays out, None where it computes right.
_FAULT: Quantity[str, str | None] = Quantity("kernels", str, lambda: TypeAdapter(str | None))


def build_key(files: Sequence[Path], table: str) -> str:
    """Raises OSError."""
    hashes = [sha256_file(file) for file in files]
    return hashlib.sha256("\n".join([*hashes, table]).encode()).hexdigest()


def fault(key: str, ggml: Path) -> str | None:
    """Why the plugin does not fit this build, None where it does; tried once, in a process of its
    own. ggml: the library that is opened there."""
    known = _FAULT.read(key)
    if known is not None:
        return known.value
    reason, lasts = _tried(ggml)
    if lasts:
        _FAULT.keep(key, reason)
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
