"""Entry points of runtimes, exporters, drafters and apps.

A package adds a plugin by declaring it, without touching this repository:

    [project.entry-points."edge_spec.drafters"]
    mine = "my_package:make_drafter"
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from edge_spec.errors import MissingDependencyError, UsageError, install

_EXTRAS = ("llamacpp", "coreai", "coreml", "openvino", "serve", "desktop")


def find(kind: str) -> EntryPoints:
    """Return the entry points of this kind. Packages are searched once: it takes 10 ms."""
    return _search(kind, tuple(sys.path))


@cache
def _search(kind: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=f"edge_spec.{kind}")


def names(kind: str) -> list[str]:
    """Return the names of the installed plugins of this kind."""
    return sorted({point.name for point in find(kind)})


def installed(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points by name, not loaded; the first wins."""
    return {point.name: point for point in reversed(list(find(kind)))}


def extra_of(plugin: str) -> str:
    """Return our extra that installs a plugin's library."""
    return plugin if plugin in _EXTRAS else "cpu"


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = load_plugin("apps", name)
    return app


def load_plugin(kind: str, name: str) -> Any:
    """Load a plugin. Raises UsageError if none has this name, else as `load` does."""
    point = installed(kind).get(name)
    if point is None:
        raise UsageError(
            f"there is no {kind.removesuffix('s')} called {name!r}",
            remedy=f"Installed: {', '.join(names(kind)) or 'none'}.",
        )
    return load(kind, point)


def load(kind: str, point: EntryPoint) -> Any:
    """Load an entry point. Raises MissingDependencyError if a library is missing."""
    name = point.name
    try:
        return point.load()
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind.removesuffix('s')} {name!r} needs a library that is not installed: {error}",
            remedy=f"{install(extra_of(name))}.",
        ) from error


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence logs below errors: coremltools warns of parts that only macOS has."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
