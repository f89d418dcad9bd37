"""Finds runtimes, exporters, drafters and apps by entry point: the only dynamic importer.

A package adds one by declaring it, without touching this repository:

    [project.entry-points."edge_spec.drafters"]
    mine = "my_package:MyDrafter"
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.model import Checkpoint, Exporter, Published, Runtime

AUTO_RUNTIMES = (("ort", "onnxruntime"), ("llamacpp", "llama_cpp"), ("ik", "ik_llama_cpp"))
AUTO_DRAFTERS = ("suffix",)
DRAFT_MODEL = "draft-model"  # the one drafter that needs a second model


def names(kind: str) -> list[str]:
    """The installed "runtimes", "exporters", "drafters" or "apps"."""
    found = set(entry_points(group=f"edge_spec.{kind}").names)
    return sorted(found | {DRAFT_MODEL} if kind == "drafters" else found)


def load_runtime(name: str) -> Runtime:
    """ "auto" is the first of AUTO_RUNTIMES whose library is installed."""
    if name == "auto":
        installed = (runtime for runtime, module in AUTO_RUNTIMES if find_spec(module))
        name = next(installed, AUTO_RUNTIMES[0][0])
    runtime: Runtime = _load("runtimes", name)()
    return runtime


def load_exporter(name: str) -> Exporter:
    exporter: Exporter = _load("exporters", name)()
    return exporter


def load_drafters(chosen: str, draft_model: Callable[[], Drafter] | None = None) -> list[Drafter]:
    """New drafters for "auto", "none", or names joined by commas.

    draft_model makes the drafter of the draft, where there is one; "auto" then means it.
    """
    if chosen == "none":
        return []
    wanted = [name.strip() for name in chosen.split(",")]
    if chosen == "auto":
        wanted = [DRAFT_MODEL] if draft_model else list(AUTO_DRAFTERS)
    if DRAFT_MODEL in wanted and draft_model is None:
        raise UsageError(
            f"the drafter {DRAFT_MODEL} needs a second model", remedy="Name it with --draft MODEL."
        )
    return [
        draft_model() if name == DRAFT_MODEL and draft_model else _load("drafters", name)()
        for name in wanted
    ]


def load_app(name: str) -> Callable[..., None]:
    app: Callable[..., None] = _load("apps", name)
    return app


def open_checkpoint(path: Path) -> Checkpoint:
    """A published model that can be converted, by the reader that exporters provide."""
    checkpoint: Checkpoint = _load("checkpoints", "default")(path)
    return checkpoint


def open_published(path: Path) -> Published:
    """A GGUF file of any architecture, checked as far as it is known."""
    published: Published = _load("checkpoints", "gguf")(path)
    return published


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
