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
from typing import Any

from edge_spec.errors import MissingDependencyError, UsageError

# That bring a plugin's library; else "cpu".
EXTRAS = {
    "llamacpp": "llamacpp",
    "ik": "ik",
    "coreml": "coreml",
    "openvino": "openvino",
    "serve": "serve",
    "desktop": "desktop",
}
# What an earlier version had, and what there is instead.
_GONE = {
    ("runtimes", "mil"): "Every export to Core ML is compared with the reference in numpy; "
    "--runtime coreml runs it on macOS."
}


def names(kind: str) -> list[str]:
    """The installed "runtimes", "exporters", "drafters" or "apps"."""
    return sorted(set(entry_points(group=f"edge_spec.{kind}").names))


def installed(kind: str) -> dict[str, EntryPoint]:
    """The same by name, not yet loaded."""
    return {point.name: point for point in reversed(entry_points(group=f"edge_spec.{kind}"))}


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = load_plugin("apps", name)
    return app


def load_plugin(kind: str, name: str) -> Any:
    """Raises UsageError where there is none of that name, and as `load` does."""
    found = entry_points(group=f"edge_spec.{kind}", name=name)
    if not found:
        if (kind, name) in _GONE:
            raise UsageError(f"there is no runtime {name} any more", remedy=_GONE[kind, name])
        raise UsageError(
            f"there is no {kind.removesuffix('s')} called {name!r}",
            remedy=f"Installed: {', '.join(names(kind)) or 'none'}.",
        )
    return load(kind, next(iter(found)))


def load(kind: str, point: EntryPoint) -> Any:
    """Raises MissingDependencyError where a library of it is missing."""
    name = point.name
    try:
        return point.load()
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind.removesuffix('s')} {name!r} needs a library that is not installed: {error}",
            remedy=f'Run: pip install "edge-spec[{EXTRAS.get(name, "cpu")}]".',
        ) from error


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
