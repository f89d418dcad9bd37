"""Finds runtimes, exporters, drafters and apps by entry point: the only dynamic importer.

A package adds one by declaring it, without touching this repository:

    [project.entry-points."edge_spec.drafters"]
    mine = "my_package:MyDrafter"
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.model import Checkpoint, Exporter, Runtime

AUTO_DRAFTERS = ("suffix",)


def names(kind: str) -> list[str]:
    """The installed "runtimes", "exporters", "drafters" or "apps"."""
    return sorted(entry_points(group=f"edge_spec.{kind}").names)


def load_runtime(name: str) -> Runtime:
    runtime: Runtime = _load("runtimes", name)()
    return runtime


def load_exporter(name: str) -> Exporter:
    exporter: Exporter = _load("exporters", name)()
    return exporter


def load_drafters(chosen: str) -> list[Drafter]:
    """New drafters for "auto", "none", or names joined by commas."""
    if chosen == "none":
        return []
    wanted = AUTO_DRAFTERS if chosen == "auto" else [name.strip() for name in chosen.split(",")]
    return [_load("drafters", name)() for name in wanted]


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = _load("apps", name)
    return app


def open_checkpoint(path: Path) -> Checkpoint:
    """A published model, by the reader that exporters provide."""
    checkpoint: Checkpoint = _load("checkpoints", "default")(path)
    return checkpoint


def _load(kind: str, name: str) -> Any:
    found = entry_points(group=f"edge_spec.{kind}", name=name)
    if not found:
        raise UsageError(
            f"there is no {kind.removesuffix('s')} called {name!r}",
            remedy=f"Installed: {', '.join(names(kind)) or 'none'}.",
        )
    try:
        return next(iter(found)).load()
    except ImportError as error:
        raise MissingDependencyError(
            f"{kind.removesuffix('s')} {name!r} needs a library that is not installed: {error}",
            remedy='Run: pip install "edge-spec[cpu]".',
        ) from error
