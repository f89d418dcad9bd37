"""Third stage: the weights of the models are read, those of the target last.

What an option or a drafter refuses is refused before that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from edge_spec.control.adaptive import stage_of
from edge_spec.control.cost import RowCosts
from edge_spec.core.model import Capabilities, Model
from edge_spec.drafters import factory
from edge_spec.drafters.draft.cross_tokenizer import CrossTokenizerDrafter
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.lookup.corpus_index import open_corpus
from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.loader.head import open_trained_head
from edge_spec.loader.place import PlacedModels
from edge_spec.models.bundle import Bundle
from edge_spec.models.options import DraftingOptions
from edge_spec.models.pair_history import PairHistory, history_path
from edge_spec.models.resolve import ResolvedModel
from edge_spec.placement.gains import can_overlap, cheap_rows, draft_token_s
from edge_spec.placement.layer_selection import ChosenPart, ExitSearch, SkipSearch, saved_parts
from edge_spec.placement.profile import (
    TYPICAL_TOKENS,
    PairFindings,
    Profile,
    ProfileKey,
    load_pair,
    load_profile,
    profile_key,
)
from edge_spec.placement.row_findings import begun_costs, row_costs, rows_key
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.vocabulary import same_vocabulary

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenModels:
    """The target and all that drafts for it, ready to run."""

    target: Model
    drafts: Sequence[Draft]
    drafters: Sequence[Drafter]
    context: DrafterContext
    costs: Callable[[], RowCosts]  # of the target
    key: ProfileKey  # of the target
    begins_overlapped: bool = True  # whether the first draft goes on while the target verifies
    history: PairHistory | None = None  # of the target and its first draft


def open_models(
    placed: PlacedModels, open_target: Callable[[], Model], opened: ExitStack
) -> OpenModels:
    """opened: closes all of them. Raises an EdgeSpecError, and TargetRefusedError where another
    runtime may be asked for the target."""
    options, target = placed.options, placed.target
    key = profile_key(placed.source, target, options.runtime_options)
    profile = load_profile(key, target.profiles)
    findings = _pair_findings(placed, key)
    history = None
    if placed.drafts:
        history = PairHistory(history_path(placed.source, placed.draft_sources[0]))
    drafts = []
    for draft in _open_drafts(placed, findings, history):
        opened.callback(draft.close)
        drafts.append(draft)

    @cache
    def costs() -> RowCosts:
        return _costs(loaded, key, profile)

    @cache
    def measured() -> RowCosts:
        return row_costs(loaded, rows_key(key, loaded.config)) if profile is None else costs()

    context = _drafter_context(placed, drafts, costs, measured, options)
    is_measured = options.drafter == "auto"  # which the costs of rows decide, and refuses nothing
    drafters = [] if is_measured else factory.load_drafters(options.drafter, context)
    loaded = open_target()
    opened.callback(loaded.close)
    if is_measured:
        drafters = factory.load_drafters(options.drafter, context)
    check_capabilities(target.name, target.runtime.name, loaded, options)
    if drafts and drafts[0].step_s and costs().is_scaled:
        _warn_of_slow_draft(options.drafts[0], drafts[0].step_s, costs().at(1))
    begins = findings is None or can_overlap(findings, costs(), drafts[0].step_s)
    return OpenModels(loaded, drafts, drafters, context, costs, key, begins, history)


def _pair_findings(placed: PlacedModels, key: ProfileKey) -> PairFindings | None:
    """Returns how the target and its first draft run beside each other, if `plan` has measured
    that."""
    if not placed.drafts:
        return None
    draft, options = placed.drafts[0], placed.options.draft_runtime_options
    return load_pair(key, profile_key(placed.draft_sources[0], draft, options))


def _open_drafts(
    placed: PlacedModels, findings: PairFindings | None, history: PairHistory | None
) -> Iterator[Draft]:
    """findings, history: of the first one beside its target."""
    options = placed.options
    above = placed.target
    known = None if history is None else history.first_acceptance()
    for source, draft in zip(placed.draft_sources, placed.drafts, strict=True):
        translated: Callable[[Drafter], Drafter] | None = None
        vocab_size = above.config.vocab_size
        if not same_vocabulary(above.vocabulary(), draft.vocabulary()):
            _log.info("%s has other tokens than %s: its text is read", draft.name, above.name)
            codecs = above.text.tokenizer, draft.text.tokenizer
            translated = partial(CrossTokenizerDrafter, target=codecs[0], draft=codecs[1])
            vocab_size = draft.config.vocab_size
        model = draft.open(options.draft_runtime_options)
        key = profile_key(source, draft, options.draft_runtime_options)
        profile = load_profile(key, draft.profiles)
        costs = _costs(model, key, profile)
        level = partial(stage_of, model, costs)
        paired = findings if above is placed.target else None
        step_s = 0.0  # not known: its first draft tokens tell
        if costs.is_scaled or (paired is not None and paired.draft_token_s is not None):
            step_s = draft_token_s(costs, profile, paired)
        anticipates = options.anticipates and above is placed.target and translated is None
        yield Draft(
            model,
            vocab_size,
            step_s,
            level,
            translated,
            anticipates,
            key.digest,
            known if above is placed.target else None,
        )
        above = draft


def _costs(model: Model, key: ProfileKey, profile: Profile | None) -> RowCosts:
    if profile is not None:
        return profile.costs(TYPICAL_TOKENS)
    return begun_costs(model, rows_key(key, model.config))


def _drafter_context(
    placed: PlacedModels,
    drafts: Sequence[Draft],
    costs: Callable[[], RowCosts],
    measured: Callable[[], RowCosts],
    options: DraftingOptions,
) -> DrafterContext:
    """costs, measured: of the target's rows; the second in seconds, for searches that were asked
    for and are themselves measurements."""
    source, target = placed.source, placed.target
    tokenizer = target.text.tokenizer
    parts = saved_parts(target.source) if isinstance(target.source, Bundle) else {}
    if options.exit_layer is not None:
        parts["early-exit"] = _asked_exit(options.exit_layer, target)
    return DrafterContext(
        vocab_size=target.config.vocab_size,
        tokens=tokenizer.vocabulary,
        answers_file=cache_directory() / "answers" / f"{source.name}-{source.identity}.json",
        keeps_answers=options.keeps_answers,
        remember=options.remember,
        corpora=[open_corpus(Path(path), tokenizer, source.progress) for path in options.corpora],
        draft_n_max=options.draft_n_max,
        window=options.window,
        fill=options.fill,
        searches={"early-exit": ExitSearch(measured), "layer-skip": SkipSearch(measured)},
        parts=parts,
        drafts=drafts,
        cheap_rows=lambda: cheap_rows(costs()),
        head=(
            None
            if options.head is None
            else open_trained_head(options.head, source, target, placed.options.threads)
        ),
    )


def _asked_exit(layer: int, target: ResolvedModel) -> ChosenPart:
    """Raises UsageError for a layer that the model does not have, or its last."""
    if not 1 <= layer < target.config.num_layers:
        raise UsageError(
            f"{target.name} cannot exit at layer {layer}",
            remedy=f"Choose 1 to {target.config.num_layers - 1}.",
        )
    return ChosenPart(layer)


def _warn_of_slow_draft(name: str, draft_s: float, target_s: float) -> None:
    if draft_s >= target_s:
        _log.warning(
            "a step of the draft %s takes %.2f times as long as one of its target: it is asked "
            "only where that pays; choose a smaller one",
            name,
            draft_s / target_s,
        )


def check_capabilities(name: str, runtime: str, model: Model, options: DraftingOptions) -> None:
    """Refuses here what the model cannot do, so that nothing fails in the middle of a text.

    Raises UsageError, UnsupportedModelError.
    """
    max_rows = model.capabilities.verified_rows
    if options.draft_n_max is not None and options.draft_n_max >= max_rows:
        raise UsageError(
            f"{options.draft_n_max} draft tokens a round are too many",
            remedy=f"{runtime} takes at most {max_rows - 1}.",
        )
    window = options.window
    if window is not None and window.num_rows > max_rows:
        raise UsageError(
            f"a lookahead window of {window} takes {window.num_rows} rows a pass",
            remedy=f"{runtime} takes at most {max_rows}: (N - 1) * (W + G) has to fit.",
        )
    if not model.capabilities.rollback:
        raise UnsupportedModelError(
            f"{name} on {runtime} cannot rewind its cache, which speculation and chat need",
            remedy="Use another runtime or model.",
        )
    if not model.capabilities.trees:
        _tell_of_chains(name, runtime, model.capabilities, options)


def _tell_of_chains(
    name: str, runtime: str, capabilities: Capabilities, options: DraftingOptions
) -> None:
    """Logs one line if drafters were asked for by name whose draft tokens would branch."""
    traits = factory.traits_of(options.drafter)
    branching = [each for each, declared in traits.items() if declared.trees]
    if branching:
        why = capabilities.why_no_trees or "rows of its passes cannot branch"
        _log.warning(
            "%s on %s is drafted for in chains, not in the trees of %s: %s",
            name,
            runtime,
            ", ".join(branching),
            why,
        )
