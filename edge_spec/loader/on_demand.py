"""Models that a server opens when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.engine.engine import Engine
from edge_spec.loader.place import PlacedModels
from edge_spec.models.asked_options import AskedOptions


class Opening(Protocol):
    """Opens a model."""

    def __call__(
        self, *, report: Progress | None, screen: Callable[[PlacedModels], None] | None
    ) -> Engine:
        """report: None shows the progress to whoever started the program. screen: is shown the
        models before their weights are read. Raises an EdgeSpecError, and what the two raise."""


@dataclass(frozen=True)
class ModelOnDemand:
    """A model that is opened when it is asked for, and may be closed and opened again.

    name: what lists and answers call it; aliases: what requests may call it, too; plan: what
    `edge-spec plan` keeps of it, as `edge-spec plan --json` prints it.
    """

    name: str
    open: Opening
    aliases: tuple[str, ...] = ()
    plan: Callable[[], Mapping[str, Any] | None] = lambda: None


def options_of_others(asked: AskedOptions) -> AskedOptions:
    """Returns the options of all models but the first, where one command names several: a plan, a
    draft that is named and the layers of early exit are of one model."""
    asked = replace(asked, plan=None, exit_layer=None)
    named = [asked.draft] if isinstance(asked.draft, str) else asked.draft or []
    if not set(named) - {"auto", "none"}:
        return asked
    traits = factory.traits_of(asked.drafter).values()
    needs_draft = any(each.draft_model for each in traits)
    return replace(
        asked,
        draft=None,
        draft_runtime="auto",
        draft_device=None,
        draft_threads=None,
        drafter="auto" if needs_draft else asked.drafter,
    )
