"""First two stages: which models are meant, and which runtime and devices each gets.

Nothing of their weights is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import cheapest, chosen_drafts, trained_drafter
from edge_spec.models.hub import is_on_hub
from edge_spec.models.memory import forecast, require_fit, require_room_to_convert
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import (
    Refusal,
    Resolution,
    ResolvedModel,
    RuntimeCandidates,
    candidates_for,
    prepare_model,
)
from edge_spec.models.source import Source
from edge_spec.placement.plan import planned
from edge_spec.placement.runtime_order import runtime_order
from edge_spec.storage.atomic import expanded
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import require_same_vocabulary

_log = logging.getLogger(__name__)


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


def trained_options(source: Source, asked: AskedOptions) -> AskedOptions | None:
    """Returns the options with the drafter that was trained here for the model; None where none
    pays, or other drafters were asked for. Raises as `Source.path` does."""
    if asked.draft is not None or asked.drafter != "auto" or asked.plan is not None:
        return None
    trained = trained_drafter(source)
    return None if trained is None else replace(asked, draft=[str(trained)])


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


@dataclass(frozen=True)
class PlacedModels:
    """The target and its drafts, each with a runtime; options: as a plan completed them."""

    options: LoadOptions
    source: Source
    target: ResolvedModel
    draft_sources: tuple[Source, ...]
    drafts: tuple[ResolvedModel, ...]  # of each source one
    identity: str  # of the target's files, as a runtime was chosen for them
    others: RuntimeCandidates | None  # that are asked for the target if its runtime fails

    @property
    def context_length(self) -> int:
        """Tokens that the target will take, but for the few that its runtime keeps for itself."""
        own = self.target.config.context_length
        return min(own, self.options.context_length or own)


def place_models(
    source: Source, options: LoadOptions, needs_chat: bool = False, makes_room: bool = False
) -> PlacedModels:
    """Converts what no runtime reads as it is. Raises an EdgeSpecError, UsageError for a draft of
    a draft with other tokens.

    needs_chat: converts no target without a chat template that compiles. makes_room: as in
    `require_fit`.
    """
    progress = source.progress
    options = planned(source, options, progress)
    candidates = candidates_for(source, options.runtime, options, options.providers)
    if needs_chat and _reads_header(source, candidates):
        ChatTemplate(source.header.chat_template)
    if candidates.is_bound:
        candidates.resolution(candidates.names[0])  # nothing is fetched for one that is missing
    identity = source.identity
    order = runtime_order(candidates, options.runtime_options)
    if order.names[0] != candidates.names[0]:
        _log.info("%s", order.reason)
    if order.seconds and order.better:
        progress(order.better, 0.0)
    return _place_first(source, options, order.candidates, identity, needs_chat, makes_room)


def place_on_next(placed: PlacedModels, error: EdgeSpecError, makes_room: bool) -> PlacedModels:
    """Places the target on the next runtime, since its own has failed, which one line says. Raises
    that error where there is none."""
    others = _next(placed.others, placed.target.runtime.name, error)
    if others is None:
        raise error
    return _place_first(placed.source, placed.options, others, placed.identity, False, makes_room)


def _next(
    others: RuntimeCandidates | None, refused: str, error: EdgeSpecError
) -> RuntimeCandidates | None:
    """Returns who is asked after a runtime that failed. One whose models are smaller is no reason
    to convert a model."""
    if others is not None and isinstance(error, DeviceMemoryError):
        others = others.without_conversion()
    if others is None:
        return None
    return replace(others, refusals=(*others.refusals, Refusal(refused, error)))


def _place_first(
    source: Source,
    options: LoadOptions,
    candidates: RuntimeCandidates,
    identity: str,
    needs_chat: bool,
    makes_room: bool,
) -> PlacedModels:
    """Places the target on the first runtime that can run it and has the memory."""
    while True:
        chosen = candidates.choose()
        others = None if candidates.is_bound else candidates.after(chosen)
        try:
            placed = _placed(source, options, chosen, needs_chat)
            require_fit(placed.target, placed.drafts, options, makes_room)
        except DeviceMemoryError as error:
            left = _next(others, chosen.runtime.name, error)
            if left is None:
                raise
            candidates = left
            continue
        memory = forecast(placed.target, placed.drafts, options) if placed.drafts else None
        if memory is not None:
            source.progress(f"Loading {memory}", 0.0)
            if memory.warning:
                _log.warning("%s", memory.warning)
        return replace(placed, identity=identity, others=others)


def _placed(
    source: Source, options: LoadOptions, chosen: Resolution, needs_chat: bool
) -> PlacedModels:
    progress = source.progress
    sources = tuple(Source(name, progress) for name in options.drafts)
    # Chosen before the target is converted, which takes longer than to read a header.
    how, chosen_drafts = options.draft_runtime_options, []
    for draft in sources:
        found = candidates_for(draft, options.draft_runtime, options, options.draft_providers)
        chosen_drafts.append(runtime_order(found, how).candidates.choose())
    target = prepare_model(
        chosen,
        progress,
        before_conversion=partial(_require_worth_converting, needs_chat, options.head),
    )
    target = _translating(target, options)
    if options.parse_special:
        made = target.make_text
        target = replace(target, make_text=lambda: replace(made(), parse_special=True))
    drafts = tuple(
        cheapest(draft, of, progress)
        for draft, of in zip(
            _prepared_drafts(target, chosen_drafts, progress), sources, strict=True
        )
    )
    return PlacedModels(options, source, target, sources, drafts, source.identity, None)


def _translating(target: ResolvedModel, options: LoadOptions) -> ResolvedModel:
    """Returns it with the languages that were asked for. Raises UsageError, also for a translator
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


def _reads_header(source: Source, candidates: RuntimeCandidates) -> bool:
    """Says whether the header of the target's GGUF file is read in any case."""
    if source.formats is not None or not source.path.is_file():
        return False
    return candidates.resolution(candidates.names[0]).reads_header


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
    target: ResolvedModel, chosen: Sequence[Resolution], progress: Progress
) -> Iterator[ResolvedModel]:
    above = None
    for each in chosen:
        draft = prepare_model(each, progress, before_conversion=require_room_to_convert)
        _require_same_kind(target, draft)
        if above is not None:
            require_same_vocabulary(above.vocabulary(), draft.vocabulary(), above.name, draft.name)
        yield draft
        above = draft


def _require_same_kind(target: ResolvedModel, draft: ResolvedModel) -> None:
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
