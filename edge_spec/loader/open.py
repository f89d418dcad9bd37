"""Prepare a plan, open its models, and compose an engine.

Preparing converts what no runtime reads directly, reads headers, and checks that all models fit.
Weights follow, the target's last, so options and drafters refuse before that.

A library that kills the process while it opens a model cannot be caught. A mark is left meanwhile;
if the next start finds one of a dead process, it first opens the model in a separate process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import HasWays, Model, Progress
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.lookup.corpus_index import open_corpus
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.batch import Batch
from edge_spec.engine.components import EngineComponents, Learner
from edge_spec.engine.engine import Engine
from edge_spec.engine.prompt_cache import PREFILL_TOKENS, PromptCache, StateFiles
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import free_bytes, processor
from edge_spec.models.draft_choice import cheapest
from edge_spec.models.memory import forecast, require_fit, require_room_to_convert
from edge_spec.models.model_plan import ModelPlan, PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidate_of, described
from edge_spec.placement.layer_selection import ChosenPart, saved_parts
from edge_spec.scheduler.adaptive import stage_of
from edge_spec.scheduler.batch_invariance import widths_for
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.engine_plan import EnginePlan
from edge_spec.scheduler.lossless import keep_promise
from edge_spec.scheduler.profile import (
    Profile,
    ProfileKey,
    load_learnt,
    load_profile,
    profile_key,
    save_learnt,
)
from edge_spec.scheduler.row_findings import (
    RoundTimes,
    begun_costs,
    rows_key,
    settle_rows,
)
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.grammar import GrammarCompiler
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.vocabulary import require_same_vocabulary, same_vocabulary

if TYPE_CHECKING:
    from edge_spec.drafters.draft.draft_model import Draft

_TRIAL_S = 300.0  # to open a model in
# Largest file to open concurrently: a refusal meanwhile waits about a second.
_MOST_BYTES = 2_500_000_000
_ROOM = 2  # times such a file must be free, as nothing is closed first
_log = logging.getLogger(__name__)


class TargetRefusedError(Exception):
    """The runtime cannot run the target; another one may."""

    def __init__(self, error: EdgeSpecError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class PreparedEngine:
    """A plan's target and drafts, ready to be opened."""

    plan: EnginePlan
    target: PreparedModel
    drafts: tuple[PreparedModel, ...]  # one for each of the plan's drafts

    @property
    def options(self) -> LoadOptions:
        return self.plan.options

    @property
    def source(self) -> Source:
        return self.plan.source

    @property
    def context_length(self) -> int:
        """Tokens that the target accepts, with the few that its runtime reserves."""
        own = self.target.config.context_length
        return min(own, self.options.context_length or own)


def prepare_engine(
    plan: EnginePlan, needs_chat: bool = False, makes_room: bool = False
) -> PreparedEngine:
    """Convert what has to be, and check that the models fit. needs_chat: convert no target without
    a valid chat template. makes_room: as in `require_fit`. Raises an EdgeSpecError:
    DeviceMemoryError if memory is short, UsageError if a draft's draft has other tokens."""
    options, progress = plan.options, plan.source.progress
    target = plan.target.prepare(
        progress, before_conversion=partial(_require_worth_converting, needs_chat, options.head)
    )
    target = _translating(target, options)
    if options.parse_special:
        made = target.make_text
        target = replace(target, make_text=lambda: replace(made(), parse_special=True))
    drafts = tuple(_prepared_drafts(target, plan.drafts, progress))
    require_fit(target, drafts, makes_room)
    memory = forecast(target, drafts) if drafts else None
    if memory is not None:
        progress(f"Loading {memory}", 0.0)
    return PreparedEngine(plan, target, drafts)


def _translating(target: PreparedModel, options: LoadOptions) -> PreparedModel:
    """Apply the requested languages. Raises UsageError, also for a translator without a target
    language."""
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
    """Raise before a conversion of minutes what would be raised after it. model: as its exporter
    reads it, weights unread; some have no known shape."""
    if needs_chat:
        ChatTemplate(model.chat_template)
    require_room_to_convert(model)
    config = getattr(model, "config", None)
    if head is not None and isinstance(config, ModelConfig):
        runtimes.open_head(head, config, has_weights=False)


def _prepared_drafts(
    target: PreparedModel, plans: tuple[ModelPlan, ...], progress: Progress
) -> Iterator[PreparedModel]:
    above = None
    for each in plans:
        draft = each.prepare(progress, before_conversion=require_room_to_convert)
        _require_same_kind(target, draft)
        if above is not None:
            require_same_vocabulary(above.vocabulary(), draft.vocabulary(), above.name, draft.name)
        above = draft
        yield cheapest(draft, each.source, progress)


def _require_same_kind(target: PreparedModel, draft: PreparedModel) -> None:
    """Raise UsageError if only one has an encoder, or sources end differently: a text would mean
    different things to them."""
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


def begin_opening(prepared: PreparedEngine, opened: ExitStack) -> Callable[[], Model]:
    """Start opening the target, a quick one at once in a thread, while its text is prepared. Return
    a function that waits for it and raises as `open_target` does. opened: closes the model, even if
    nobody waited."""

    def open_now() -> Model:
        model = open_target(prepared)
        opened.callback(model.close)
        return model

    if not _opens_beside(prepared):
        return open_now
    pool = ThreadPoolExecutor(1, "edge-spec-opening")
    opening = pool.submit(copy_context().run, open_target, prepared)
    pool.shutdown(wait=False)

    def close() -> None:
        if opening.exception() is None:
            opening.result().close()

    opened.callback(close)
    return opening.result


def _opens_beside(prepared: PreparedEngine) -> bool:
    runtime = prepared.target.runtime
    if not runtime.opens_beside or _is_left(_mark(prepared)):
        return False
    free, size = free_bytes(), prepared.target.source.path.stat().st_size
    return size <= _MOST_BYTES and (free is None or free >= _ROOM * size)


def open_target(prepared: PreparedEngine) -> Model:
    """Open the target. Raises TargetRefusedError if another runtime may work."""
    try:
        _try_apart(prepared)
        with _marked(_mark(prepared)):
            return prepared.target.open()
    except (DeviceError, UnsupportedModelError, MissingDependencyError) as error:
        raise TargetRefusedError(error) from error


def _mark(prepared: PreparedEngine) -> Path:
    name = f"{prepared.target.runtime.name}-{prepared.source.identity}"
    return cache_directory() / "opening" / name


@contextmanager
def _marked(mark: Path) -> Iterator[None]:
    """Mark the process during the block; failing to write the mark does no harm."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(os.getpid()), encoding="ascii")
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def _try_apart(prepared: PreparedEngine) -> None:
    """Raises DeviceError if opening the model kills the process."""
    if not _is_left(_mark(prepared)):
        return
    runtime = prepared.target.runtime.name
    place = described(prepared.source.model, processor(runtime), prepared.target.how)
    try:
        isolated(open_described, place, timeout_s=_TRIAL_S)
    except IsolatedError as error:
        raise DeviceError(
            f"{runtime} does not survive opening {prepared.source.name}: {error}",
            remedy="Use another runtime, or another version of its library.",
        ) from None


def _is_left(mark: Path) -> bool:
    """Return whether the mark's process is dead; never on Windows, where probing a process may end
    it."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(int(mark.read_text(encoding="ascii")), 0)
    except (ProcessLookupError, ValueError):
        return True
    except OSError:  # no mark, or another user's process
        return False
    return False


def open_described(place: str) -> None:
    """Open a model in the other process."""
    candidate_of(place).prepared.open().close()


@dataclass(frozen=True)
class OpenModels:
    """The target and its drafters, ready to run."""

    prepared: PreparedEngine
    target: Model
    drafts: Sequence[Draft]
    drafters: Sequence[Drafter]
    context: DrafterContext
    costs: Callable[[], RowCosts]  # of the target
    key: ProfileKey  # of the target


def open_models(
    prepared: PreparedEngine, open_target: Callable[[], Model], opened: ExitStack
) -> OpenModels:
    """Open all models and drafters, which `opened` closes. Raises an EdgeSpecError,
    TargetRefusedError if another runtime may run the target."""
    options, target = prepared.options, prepared.target
    key = profile_key(prepared.source, target)
    profile = load_profile(key)
    drafts: list[Draft] = []
    for draft in _open_drafts(prepared):
        opened.callback(draft.close)
        drafts.append(draft)

    @cache
    def costs() -> RowCosts:
        return _costs(loaded, key, profile)

    context = _drafter_context(prepared, drafts)
    drafters = factory.load_drafters(options.drafter, context)
    loaded = open_target()
    check_capabilities(target.name, target.runtime.name, loaded, options)
    return OpenModels(prepared, loaded, drafts, drafters, context, costs, key)


def _open_drafts(prepared: PreparedEngine) -> Iterator[Draft]:
    from edge_spec.drafters.draft.cross_tokenizer import CrossTokenizerDrafter
    from edge_spec.drafters.draft.draft_model import Draft

    above = prepared.target
    for plan, draft in zip(prepared.plan.drafts, prepared.drafts, strict=True):
        translated: Callable[[Drafter], Drafter] | None = None
        vocab_size = above.config.vocab_size
        if not same_vocabulary(above.vocabulary(), draft.vocabulary()):
            _log.info("%s has other tokens than %s: its text is read", draft.name, above.name)
            codecs = above.text.tokenizer, draft.text.tokenizer
            translated = partial(CrossTokenizerDrafter, target=codecs[0], draft=codecs[1])
            vocab_size = draft.config.vocab_size
        model = draft.open()
        key = profile_key(plan.source, draft)
        costs = _costs(model, key, load_profile(key))
        level = partial(stage_of, model, costs)
        step_s = costs.at(1) if costs.is_scaled else 0.0  # else its first draft tokens show it
        anticipates = prepared.plan.anticipates and above is prepared.target and translated is None
        yield Draft(model, vocab_size, step_s, level, translated, anticipates, key.digest)
        above = draft


def _costs(model: Model, key: ProfileKey, profile: Profile | None) -> RowCosts:
    if profile is not None:
        return profile.costs()
    return begun_costs(model, rows_key(key, model.config))


def _drafter_context(prepared: PreparedEngine, drafts: Sequence[Draft]) -> DrafterContext:
    source, target, options = prepared.source, prepared.target, prepared.options
    tokenizer = target.text.tokenizer
    parts = saved_parts(target.source) if isinstance(target.source, Bundle) else {}
    layer = options.exit_layer
    if layer is not None:
        if not 1 <= layer < target.config.num_layers:
            raise UsageError(
                f"{target.name} cannot exit at layer {layer}",
                remedy=f"Choose 1 to {target.config.num_layers - 1}.",
            )
        parts["early-exit"] = ChosenPart(layer)
    head = None
    if options.head is not None:
        from edge_spec.loader.head import open_trained_head

        head = open_trained_head(options.head, source, target, target.how.threads)
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
        parts=parts,
        drafts=drafts,
        cheap_rows=prepared.plan.cheap_rows,
        head=head,
    )


def check_capabilities(name: str, runtime: str, model: Model, options: LoadOptions) -> None:
    """Refuse now what would fail in the middle of a text. Raises UsageError,
    UnsupportedModelError."""
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


# Starts a learner for open models. Raises an EdgeSpecError if nothing can be learnt.
StartLearning = Callable[[OpenModels], Learner]


def compose_engine(
    models: OpenModels, opened: ExitStack, learning: StartLearning | None = None
) -> Engine:
    """Compose an engine. opened: closes what was started if the rest fails. learning: from answers,
    if requested."""
    prepared, key, model = models.prepared, models.key, models.target
    target, options = prepared.target, prepared.options
    rows = rows_key(key, model.config)
    found = settle_rows(model, rows, widths_for(options.most_rows), options.lossless_mode)
    lossless = keep_promise(options.lossless_mode, found, replays=not prepared.plan.anticipates)
    factory = SpeculationFactory(
        models.context,
        model.capabilities,
        found,
        lossless=lossless,
        overlap=prepared.plan.drafts_elsewhere,
        draft_overlap=prepared.plan.overlap,
        costs=models.costs,
    )
    speculation = factory.compose(models.drafters)
    speculation.load_stats(load_learnt(key))
    way = model.way if isinstance(model, HasWays) else None
    timeout_s = options.call_timeout_s
    if timeout_s is not None:
        from edge_spec.core.watchdog import FIRST_S, WatchedModel

        remedy = "Ask again: the text is then read again. Or give a longer --call-timeout."
        model = WatchedModel(model, timeout_s, max(timeout_s, FIRST_S), 0, remedy)
    parts = EngineComponents(
        name=target.name,
        runtime=target.runtime.name,
        model=model,
        batch=Batch(model, lossless, deepcopy(models.costs()), options.parallel_rows),
        text=target.text,
        batch_invariance=found,
        speculation=speculation,
        speculation_factory=factory,
        grammars=GrammarCompiler(
            target.text.tokenizer, target.config.vocab_size, target.text.eos_ids
        ),
        drafter=options.drafter,
        plan=prepared.plan,
        min_rows=lossless.plain_width,
        drafts=models.drafts,
        keep_learnt=partial(save_learnt, key),
        identity=prepared.source.identity,
        computing=key.digest if way is None else f"{key.digest} {way}",
        round_times=RoundTimes(rows, lossless.widths),
    )
    parts = replace(parts, prompts=PromptCache(_prompt_files(options.prompt_directory, parts)))
    if learning is not None:
        learner = learning(models)
        opened.callback(learner.close)
        parts = replace(parts, learner=learner)
    return Engine(parts)


def _prompt_files(directory: Path | None, parts: EngineComponents) -> StateFiles | None:
    if directory is None:
        return None
    architecture = {**parts.model.config.to_dict(), "context_length": 0}
    exact = parts.speculation_factory.lossless.is_exact
    build = runtimes.library_build(parts.runtime)
    made_by = [parts.identity, architecture, parts.computing, build, exact, PREFILL_TOKENS]
    described = json.dumps(made_by, sort_keys=True)
    return StateFiles(directory, hashlib.sha256(described.encode()).hexdigest())
