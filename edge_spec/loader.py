"""Composes an engine from a model's name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

from edge_spec.control.batch_invariance import EXACT_WIDTHS, MARGIN_WIDTHS, measure_batch_invariance
from edge_spec.control.cascade import stage_of
from edge_spec.control.cost import RowCosts
from edge_spec.control.overlap import DraftOverlap
from edge_spec.core.model import Model, Progress
from edge_spec.core.watchdog import FIRST_S, WatchedModel
from edge_spec.drafters import factory
from edge_spec.drafters.draft.cross_tokenizer import CrossTokenizerDrafter
from edge_spec.drafters.draft.draft import Draft
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.lookup.corpus_text import open_corpus
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_history import PairHistory, history_path
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source
from edge_spec.placement.background import profile_when_idle
from edge_spec.placement.forecast import forecast
from edge_spec.placement.layer_selection import ChosenPart, ExitSearch, SkipSearch, saved_parts
from edge_spec.placement.measure import measure_rows
from edge_spec.placement.pinning import planned
from edge_spec.placement.profile import (
    TYPICAL_TOKENS,
    ProfileKey,
    load_learnt,
    load_profile,
    profile_key,
    save_learnt,
)
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import tell_unkept
from edge_spec.text.grammar import GrammarCompiler
from edge_spec.text.vocabulary import require_same_vocabulary, same_vocabulary

_log = logging.getLogger(__name__)


def load_engine(
    model: str, options: LoadOptions, progress: Progress, measure_when_idle: bool = False
) -> Engine:
    """measure_when_idle: makes the model's profile between answers, where the cache has none.

    Raises an EdgeSpecError that names what is missing or wrong.
    """
    with ExitStack() as opened:  # closes what is open already where the rest fails
        source = Source(model, progress)
        options = planned(source, options, progress)
        target = resolve_model(source, options.runtime, options, progress, options.providers)
        prepared = _prepare_drafts(target, options, progress)
        drafts = []
        for draft in _open_drafts(target, prepared, options, progress):
            opened.callback(draft.close)
            drafts.append(draft)

        key = profile_key(source, target, options.runtime_options)
        profile = load_profile(key, target.profiles)

        @cache
        def costs() -> RowCosts:
            return measure_rows(loaded) if profile is None else profile.costs(TYPICAL_TOKENS)

        setting = _setting(source, target, drafts, costs, options, progress)
        drafters = factory.load_drafters(options.drafter, setting)
        loaded = target.open(options.runtime_options)
        opened.callback(loaded.close)
        check_capabilities(target.name, target.runtime.name, loaded, options)
        if drafts:
            _warn_of_slow_draft(options.drafts[0], drafts[0].step_s, costs().at(1))
        speculation_factory = _speculator(setting, loaded, costs, options)
        speculation = speculation_factory.compose(drafters)
        speculation.load_stats(load_learnt(key))
        parts = EngineComponents(
            name=target.name,
            runtime=target.runtime.name,
            model=_watched(loaded, options.call_timeout_s),
            text=target.text,
            batch_invariance=speculation_factory.batch_invariance,
            speculation=speculation,
            speculation_factory=speculation_factory,
            grammars=GrammarCompiler(
                target.text.tokenizer, target.config.vocab_size, target.text.eos_ids
            ),
            drafter=options.drafter,
            min_rows=speculation_factory.min_rows,
            drafts=drafts,
            history=_history(source, options, progress),
            keep_learnt=partial(_keep_learnt, key),
            identity=source.identity,
            computing=key.digest,
        )
        if measure_when_idle and profile is None:
            profiler = profile_when_idle(loaded, key, speculation_factory.branches)
            opened.callback(profiler.close)
            parts = replace(parts, idle_work=profiler)
        engine = Engine(parts)
        opened.pop_all()
    return engine


def _speculator(
    setting: DrafterContext, model: Model, costs: Callable[[], RowCosts], options: LoadOptions
) -> SpeculationFactory:
    return SpeculationFactory(
        setting,
        model.capabilities,
        measure_batch_invariance(model, EXACT_WIDTHS if options.exact else MARGIN_WIDTHS),
        exact=options.exact,
        overlap=options.drafts_elsewhere,
        draft_overlap=options.draft_overlap if options.anticipates else DraftOverlap.OFF,
        parallel_rows=options.parallel_rows,
        costs=costs,
    )


def _watched(model: Model, call_timeout_s: float | None) -> Model:
    """A pass that takes longer than this is given up."""
    if call_timeout_s is None:
        return model
    remedy = "Ask again: the text is then read again. Or give a longer --call-timeout."
    return WatchedModel(model, call_timeout_s, max(call_timeout_s, FIRST_S), 0, remedy)


def _keep_learnt(key: ProfileKey, learnt: Mapping[str, list[float]]) -> None:
    try:
        save_learnt(key, learnt)
    except OSError as error:
        tell_unkept(key.path, error)


def _history(source: Source, options: LoadOptions, progress: Progress) -> PairHistory | None:
    if not options.drafts:
        return None
    return PairHistory(history_path(source, Source(options.drafts[0], progress)))


def _setting(
    source: Source,
    target: ResolvedModel,
    drafts: Sequence[Draft],
    costs: Callable[[], RowCosts],
    options: LoadOptions,
    progress: Progress,
) -> DrafterContext:
    tokenizer = target.text.tokenizer
    parts = saved_parts(target.source) if isinstance(target.source, Bundle) else {}
    if options.exit_layer is not None:
        parts["early-exit"] = _asked_exit(options.exit_layer, target)
    return DrafterContext(
        vocab_size=target.config.vocab_size,
        tokens=tokenizer.vocabulary,
        ngram_file=cache_directory() / "ngrams" / f"{source.name}-{source.identity}.ngrams",
        keeps_ngrams=options.keeps_ngrams,
        corpora=[
            open_corpus(path, tokenizer, cache_directory(), progress) for path in options.corpora
        ],
        draft_n_max=options.draft_n_max,
        window=options.window,
        fill=options.fill,
        searches={"early-exit": ExitSearch(costs), "layer-skip": SkipSearch(costs)},
        parts=parts,
        drafts=drafts,
    )


def _asked_exit(layer: int, target: ResolvedModel) -> ChosenPart:
    """Raises UsageError for a layer that the model does not have, or its last."""
    if not 1 <= layer < target.config.num_layers:
        raise UsageError(
            f"{target.name} cannot exit at layer {layer}",
            remedy=f"Choose 1 to {target.config.num_layers - 1}.",
        )
    return ChosenPart(layer)


def _prepare_drafts(
    target: ResolvedModel, options: LoadOptions, progress: Progress
) -> list[ResolvedModel]:
    """Compares their vocabularies before any weights are read.

    Raises UsageError for a draft of a draft with other tokens.
    """
    drafts: list[ResolvedModel] = []
    for name in options.drafts:
        asked = Source(name, progress)
        draft = resolve_model(
            asked, options.draft_runtime, options, progress, options.draft_providers
        )
        if drafts:
            above = drafts[-1]
            require_same_vocabulary(above.vocabulary(), draft.vocabulary(), above.name, draft.name)
        drafts.append(draft)
    if drafts:
        memory = forecast(target, drafts, options)
        if memory is not None:
            progress(f"Loading {memory}", 0.0)
            if memory.warning:
                _log.warning("%s", memory.warning)
    return drafts


def _open_drafts(
    target: ResolvedModel, drafts: Sequence[ResolvedModel], options: LoadOptions, progress: Progress
) -> Iterator[Draft]:
    above = target
    for name, draft in zip(options.drafts, drafts, strict=True):
        translated: Callable[[Drafter], Drafter] | None = None
        vocab_size = above.config.vocab_size
        if not same_vocabulary(above.vocabulary(), draft.vocabulary()):
            _log.info("%s has other tokens than %s: its text is read", draft.name, above.name)
            codecs = above.text.tokenizer, draft.text.tokenizer
            translated = partial(CrossTokenizerDrafter, target=codecs[0], draft=codecs[1])
            vocab_size = draft.config.vocab_size
        model = draft.open(options.draft_runtime_options)
        key = profile_key(Source(name, progress), draft, options.draft_runtime_options)
        profile = load_profile(key, draft.profiles)
        costs = measure_rows(model) if profile is None else profile.costs(TYPICAL_TOKENS)
        width = costs.widest_free() if model.capabilities.trees else 1
        level = partial(stage_of, model, costs)
        anticipates = options.anticipates and above is target and translated is None
        yield Draft(
            model, vocab_size, costs.at(1), level, width, translated, anticipates, key.digest
        )
        above = draft


def _warn_of_slow_draft(name: str, draft_s: float, target_s: float) -> None:
    if draft_s >= target_s:
        _log.warning(
            "a step of the draft %s takes %.2f times as long as one of its target: it is asked "
            "only where that pays; choose a smaller one",
            name,
            draft_s / target_s,
        )


def check_capabilities(name: str, runtime: str, model: Model, options: LoadOptions) -> None:
    """What the model cannot do is refused here, never in the middle of a text.

    Raises UsageError, UnsupportedModelError.
    """
    max_rows = model.capabilities.max_rows
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
