"""The directory of --out, tried before anything takes long."""

from __future__ import annotations

from pathlib import Path

from edge_spec.errors import UsageError


def require_writable(directory: Path) -> None:
    """Makes it, if need be. Raises UsageError, now rather than when all is measured."""
    from tempfile import TemporaryFile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {directory}: {error}", remedy="Give another directory to --out."
        ) from None
