"""Finds runtimes, exporters, drafters and apps by entry point: the only dynamic importer.

A package adds one by declaring it, without touching this repository:

    [project.entry-points."edge_spec.drafters"]
    mine = "my_package:make_drafter"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_spec.errors import MissingDependencyError, UsageError

_EXTRAS = ("llamacpp", "coreml", "openvino", "serve", "desktop")
# What an earlier version had, and what there is instead.
_GONE = {
    ("runtimes", "mil"): "Every export to Core ML is compared with the reference in numpy; "
    "--runtime coreml runs it on macOS.",
    ("runtimes", "ik"): "Use --runtime llamacpp, which is faster on the same files.",
}


def names(kind: str) -> list[str]:
    """Returns the names of the installed "runtimes", "exporters", "drafters" or "apps"."""
    return sorted(set(entry_points(group=f"edge_spec.{kind}").names))


def installed(kind: str) -> dict[str, EntryPoint]:
    """Returns the entry points by name, not yet loaded: the first of each name."""
    found = list(entry_points(group=f"edge_spec.{kind}"))  # it is no sequence from Python 3.12 on
    return {point.name: point for point in reversed(found)}


def extra_of(plugin: str) -> str:
    """Returns the extra of this package that brings a plugin's library."""
    return plugin if plugin in _EXTRAS else "cpu"


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = load_plugin("apps", name)
    return app


def load_plugin(kind: str, name: str) -> Any:
    """Raises UsageError if there is none of that name, and as `load` does."""
    found = entry_points(group=f"edge_spec.{kind}", name=name)
    if not found:
        if (kind, name) in _GONE:
            raise UsageError(f"there is no runtime {name} any more", remedy=_GONE[kind, name])
        _require_whole_package()
        raise UsageError(
            f"there is no {kind.removesuffix('s')} called {name!r}",
            remedy=f"Installed: {', '.join(names(kind)) or 'none'}.",
        )
    return load(kind, next(iter(found)))


def load(kind: str, point: EntryPoint) -> Any:
    """Raises MissingDependencyError if a library of it is missing."""
    name = point.name
    try:
        return point.load()
    except ImportError as error:
        _require_whole_package()
        raise MissingDependencyError(
            f"{kind.removesuffix('s')} {name!r} needs a library that is not installed: {error}",
            remedy=f'Run: pip install "edge-spec[{extra_of(name)}]".',
        ) from error


def _require_whole_package() -> None:
    """Raises MissingDependencyError if this package is a checkout's folder, in which the runtimes,
    exporters and apps are not: an installation joins them from the folders beside it."""
    if find_spec("edge_spec.runtimes") is None:
        checkout = Path(__file__).resolve().parents[2]
        raise MissingDependencyError(
            f"edge_spec was imported from the checkout {checkout} as it lies, without its "
            "runtimes, exporters and apps",
            remedy=f"Run: pip install -e {checkout}, or leave that folder to use what is "
            "installed.",
        )


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silences what a library logs below an error: coremltools warns of every part that only macOS
    has."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
