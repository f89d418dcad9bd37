"""Finds what opening a model, or a pair, would open here, without doing it."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from subprocess import list2cmdline

from edge_spec.core.model import Progress, RuntimeOptions
from edge_spec.diagnostics.doctor.pairing import Tokens
from edge_spec.errors import EdgeSpecError, UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.models.draft_form import cheapest
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_bundle import ROLES
from edge_spec.models.resolve import ResolvedModel, find_resolved
from edge_spec.models.runtime_choice import Resolution, candidates_for
from edge_spec.models.source import Source
from edge_spec.placement.pinning import applied, planned
from edge_spec.placement.plan import Placement, Plan, plan_path, read_plan
from edge_spec.placement.runtime_order import RuntimeOrder, runtime_order


@dataclass(frozen=True)
class Opening:
    """One model; prepared is None where it would be converted first; order: in which runtimes were
    asked; fallback: why it does not run on the first one, None where it does."""

    role: str
    resolution: Resolution
    options: RuntimeOptions
    prepared: ResolvedModel | None
    order: RuntimeOrder

    @property
    def source(self) -> Source:
        return self.resolution.source

    @property
    def runtime(self) -> str:
        return self.resolution.runtime.name

    @property
    def fallback(self) -> str | None:
        return str(self.resolution) if self.resolution.refusals else None


@dataclass(frozen=True)
class Chosen:
    """asked: the draft, whether or not a plan leaves it out; options: as that plan completes
    them; tokens: of the pair; plan: in the cache; placement: the one of it that is used;
    openings: the target, and the draft where it is used; head: in the place of a draft."""

    source: Source
    asked: Source | None
    options: LoadOptions
    tokens: Tokens | None
    plan: Plan | None = None
    placement: Placement | None = None
    openings: list[Opening] = field(default_factory=list)
    head: str = ""  # its kind, as drafters declare it

    @property
    def prepared(self) -> list[ResolvedModel]:
        return [each.prepared for each in self.openings if each.prepared is not None]

    @property
    def context_length(self) -> int:
        """Tokens that the target will take."""
        own = self.prepared[0].config.context_length
        return min(own, self.options.context_length or own)

    @property
    def is_retokenized(self) -> bool:
        return self.tokens is not None and not self.tokens.compared.is_same

    @property
    def draft_tokens(self) -> float:
        """Returns the draft's tokens for each of the target's."""
        return self.tokens.ratio if self.is_retokenized and self.tokens else 1.0

    @property
    def plan_command(self) -> str:
        """Converts what has to be, and measures what passes take."""
        return self._command("plan")

    @property
    def trial_command(self) -> str:
        """Measures what speculation gains. A plan has no forecast of a draft with other tokens."""
        return self._command("bench" if self.is_retokenized else "plan")

    def _command(self, name: str) -> str:
        draft = [] if self.asked is None else ["--draft", self.asked.model]
        words = ["edge-spec", name, self.source.model, *draft]
        return list2cmdline(words) if os.name == "nt" else shlex.join(words)

    @property
    def is_converted(self) -> bool:
        return len(self.prepared) == len(self.openings)


def choose(
    source: Source,
    draft: Source | None,
    tokens: Tokens | None,
    progress: Progress,
    places: LoadOptions | None = None,
    head: str = "",
) -> Chosen:
    """places: runtimes, devices and context as asked for. head: kind of the one that was named as
    its draft. Raises an EdgeSpecError where a runtime cannot have a model."""
    drafts = () if draft is None else (draft.model,)
    asked = replace(places or LoadOptions(), draft=drafts)
    options = planned(source, asked, progress)
    plan = placement = None
    with suppress(EdgeSpecError, OSError):  # there is none, or the check of the caches names it
        plan = read_plan(plan_path(source, draft))
    if plan is not None:
        completed = ((each, applied(asked, each, plan.draft)) for each in plan.placements)
        placement = next((each for each, found in completed if found == options), None)
    chosen = Chosen(source, draft, options, tokens, plan, placement, head=head)
    roles = [(ROLES[0], source, options.runtime, options.runtime_options, options.providers)]
    if draft is not None and options.drafts:
        how = options.draft_runtime_options
        roles.append((ROLES[1], draft, options.draft_runtime, how, options.draft_providers))
    for role, each, named, how, providers in roles:
        order = runtime_order(candidates_for(each, named, options, providers), how)
        choice = order.candidates.choose()
        prepared = find_resolved(choice, progress)
        if prepared is not None and role == ROLES[1]:
            prepared = cheapest(prepared, each, progress, makes=False)
        chosen.openings.append(Opening(role, choice, how, prepared, order))
    return chosen


def require_convertible(opening: Opening) -> None:
    """Raises what opening a model that is not prepared would, if headers show it."""
    reads = opening.resolution.runtime.reads
    try:
        opening.resolution.require_convertible()
    except UnsupportedModelError as error:
        if reads == "gguf" or not opening.source.at(reads).is_file():
            raise
        option = "--runtime" if opening.role == ROLES[0] else "--draft-runtime"
        reader = f"Add {option} {runtimes.auto_runtime({'gguf'})}, which reads the file as it is."
        raise UnsupportedModelError(error.message, remedy=f"{reader} {error.remedy}") from None
