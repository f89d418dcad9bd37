"""Makes a plan ready to be opened: what no runtime reads as it is is converted, headers are read,
and it is known that all models fit. No weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.draft_choice import cheapest
from edge_spec.models.memory import forecast, require_fit, require_room_to_convert
from edge_spec.models.model_plan import ModelPlan, PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.engine_plan import EnginePlan
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import require_same_vocabulary


class TargetRefusedError(Exception):
    """The runtime cannot have the target, for a reason that another runtime may not have."""

    def __init__(self, error: EdgeSpecError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class PreparedEngine:
    """The target and its drafts, ready to be opened by a plan."""

    plan: EnginePlan
    target: PreparedModel
    drafts: tuple[PreparedModel, ...]  # of each plan's draft one
    identity: str  # of the target's files, as a runtime was chosen for them

    @property
    def options(self) -> LoadOptions:
        return self.plan.options

    @property
    def source(self) -> Source:
        return self.plan.source

    @property
    def context_length(self) -> int:
        """Tokens that the target will take, but for the few that its runtime keeps for itself."""
        own = self.target.config.context_length
        return min(own, self.options.context_length or own)


def prepare_engine(
    plan: EnginePlan, needs_chat: bool = False, makes_room: bool = False
) -> PreparedEngine:
    """Convert what has to be, and compare what models need with what there is.

    needs_chat: converts no target without a chat template that compiles. makes_room: as in
    `require_fit`. Raises an EdgeSpecError: DeviceMemoryError where memory is short, UsageError for
    a draft of a draft with other tokens.
    """
    options, progress = plan.options, plan.source.progress
    identity = plan.source.identity
    target = plan.target.prepare(
        progress, before_conversion=partial(_require_worth_converting, needs_chat, options.head)
    )
    target = _translating(target, options)
    if options.parse_special:
        made = target.make_text
        target = replace(target, make_text=lambda: replace(made(), parse_special=True))
    drafts = tuple(_prepared_drafts(target, plan.drafts, progress))
    require_fit(target, drafts, options, makes_room)
    memory = forecast(target, drafts, options) if drafts else None
    if memory is not None:
        progress(f"Loading {memory}", 0.0)
    return PreparedEngine(plan, target, drafts, identity)


def _translating(target: PreparedModel, options: LoadOptions) -> PreparedModel:
    """Return it with the languages that were asked for. Raises UsageError, also for a translator
    that nothing tells in which one to answer."""
    languages = options.source_language, options.target_language
    if target.config.encoder is None and languages == (None, None):
        return target
    tokenizer = target.text.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        return target
    lacks_one = tokenizer.source_end is not None and tokenizer.source_end.lacks_language
    if languages == (None, None) and not lacks_one:
        return target
    found = tokenizer.translating(*languages, target.name)
    end = found.source_end
    if end is not None and end.lacks_language:
        raise UsageError(
            f"{target.name} translates into {len(end.languages)} languages, and nothing says which",
            remedy=f"Give --target-language, such as {end.some()}.",
        )
    text = replace(target.text, tokenizer=found)
    return replace(target, make_text=lambda: text)


def _require_worth_converting(needs_chat: bool, head: Path | None, model: Any) -> None:
    """model: whose weights are unread, as an exporter reads it; the shape of some is not known
    before. Raises what would come after its conversion, which may take minutes."""
    if needs_chat:
        ChatTemplate(model.chat_template)
    require_room_to_convert(model)
    config = getattr(model, "config", None)
    if head is not None and isinstance(config, ModelConfig):
        runtimes.open_head(head, config, has_weights=False)


def _prepared_drafts(
    target: PreparedModel, plans: tuple[ModelPlan, ...], progress: Progress
) -> Iterator[PreparedModel]:
    """Yield each draft in its cheapest form."""
    above = None
    for each in plans:
        draft = each.prepare(progress, before_conversion=require_room_to_convert)
        _require_same_kind(target, draft)
        if above is not None:
            require_same_vocabulary(above.vocabulary(), draft.vocabulary(), above.name, draft.name)
        above = draft
        yield cheapest(draft, each.source, progress)


def _require_same_kind(target: PreparedModel, draft: PreparedModel) -> None:
    """Raises UsageError where only one of the two has an encoder, or their sources end otherwise:
    what one reads means something else to the other."""
    found = [
        each.config.encoder and (each.config.encoder.beginning, each.config.encoder.ends_source)
        for each in (target, draft)
    ]
    if found[0] != found[1]:
        raise UsageError(
            f"the draft {draft.name} cannot read what {target.name} reads: only encoder-decoders "
            "that begin their answers with the same token read a source",
            remedy="Choose a draft of the same family, or --draft none.",
        )
    if found[0] is not None:
        require_same_vocabulary(target.vocabulary(), draft.vocabulary(), target.name, draft.name)
