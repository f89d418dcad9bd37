"""First stage: which models are meant, and what is asked of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.hub.reference import is_on_hub
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.storage.atomic import expanded


def resolve_options(source: Source, asked: AskedOptions, keeps_answers: bool = True) -> LoadOptions:
    """The options with their drafts named, and checked. Raises an EdgeSpecError."""
    said = {field.name: getattr(asked, field.name) for field in fields(AskedOptions)}
    drafts = asked_drafts(source, asked)
    heads = {name: path for name in drafts if (path := head_path(name, source))}
    if len(heads) > 1 or sum(name in heads for name in drafts) > 1:
        raise UsageError("--draft names two heads", remedy="Name one of them.")
    said["draft"] = tuple(name for name in drafts if name not in heads)
    head = next(iter(heads.values()), None)
    return LoadOptions(**said, keeps_answers=keeps_answers, head=head)


def head_path(name: str, target: Source) -> Path | None:
    """Returns the path of the trained head of this name, which is fetched if it is on the hub; None
    for a model. Raises as `Source.path` does for what is on the hub."""
    path = Source(name, target.progress).path if is_on_hub(name) else expanded(Path(name))
    is_targets = path.is_file() and target.is_fetched and path.samefile(target.path)
    return path if runtimes.is_head(path, is_targets) else None


def asked_drafts(source: Source, asked: AskedOptions) -> tuple[str, ...]:
    """Raises as `chosen_drafts` does."""
    return chosen_drafts(
        source,
        [asked.draft] if isinstance(asked.draft, str) else asked.draft,
        asked.drafter,
        is_planned=asked.plan is not None,
        draft_runtime=asked.draft_runtime,
    )
