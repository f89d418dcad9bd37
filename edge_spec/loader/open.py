"""Third stage: the weights of the models are read, those of the target last.

What an option or a drafter refuses is refused before that. A library that ends the process while it
opens a model cannot be caught: a mark says that one is being opened, and where the next start finds
that of a process that is no more, it first opens the model in a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Model
from edge_spec.core.runtime_protocols import OpensBeside
from edge_spec.drafters import factory
from edge_spec.drafters.draft.cross_tokenizer import CrossTokenizerDrafter
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.lookup.corpus_index import open_corpus
from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.loader.head import open_trained_head
from edge_spec.loader.place import PlacedModels
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import free_bytes, processor
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_history import PairKey, first_acceptance, pair_key
from edge_spec.placement.candidates import candidate_of, described
from edge_spec.placement.layer_selection import ChosenPart, ExitSearch, SkipSearch, saved_parts
from edge_spec.scheduler.adaptive import stage_of
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.profile import (
    TYPICAL_TOKENS,
    PairFindings,
    Profile,
    ProfileKey,
    cheap_rows,
    draft_token_s,
    load_pair,
    load_profile,
    profile_key,
)
from edge_spec.scheduler.row_findings import begun_costs, row_costs, rows_key
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.vocabulary import same_vocabulary

_TRIAL_S = 300.0  # to open a model in
# Of a file that is opened beside other work: whoever refuses it meanwhile waits for a second or so.
_MOST_BYTES = 2_500_000_000
_ROOM = 2  # times such a file, that has to be free: nothing is closed before to make room for it
_log = logging.getLogger(__name__)


class TargetRefusedError(Exception):
    """The runtime cannot have the model, which shows only when its weights are read."""

    def __init__(self, error: EdgeSpecError) -> None:
        super().__init__(str(error))
        self.error = error


class TargetOpening:
    """Opens a target: a file that does not take long at once, in a thread of its own, while its
    text is made ready."""

    def __init__(self, placed: PlacedModels) -> None:
        self._placed = placed
        self._beside: Future[Model] | None = None  # until it is taken
        if _opens_beside(placed):
            self._beside = Future()
            run = partial(copy_context().run, _open_into, self._beside, placed)
            # A command that ends by force does not wait for it (cli/start.py).
            Thread(target=run, name="edge-spec-opening", daemon=True).start()

    def take(self) -> Model:
        """Returns it open. Raises as `open_target` does."""
        if self._beside is None:
            return open_target(self._placed)
        model = self._beside.result()
        self._beside = None
        return model

    def close(self) -> None:
        """Closes what nobody has taken."""
        if self._beside is not None and self._beside.exception() is None:
            self._beside.result().close()


def _open_into(found: Future[Model], placed: PlacedModels) -> None:
    try:
        found.set_result(open_target(placed))
    except BaseException as error:  # is told to whoever takes it
        found.set_exception(error)


def _opens_beside(placed: PlacedModels) -> bool:
    """Says whether there is no reason to wait with it."""
    runtime = placed.target.runtime
    if not isinstance(runtime, OpensBeside) or not runtime.opens_beside or _is_left(_mark(placed)):
        return False
    free, size = free_bytes(), placed.target.source.path.stat().st_size
    return size <= _MOST_BYTES and (free is None or free >= _ROOM * size)


def open_target(placed: PlacedModels) -> Model:
    """Raises ModelFileError for a file that has changed since a runtime was chosen for it,
    TargetRefusedError where another runtime may be asked, or else an EdgeSpecError."""
    _require_unchanged(placed)
    try:
        _try_apart(placed)
        with _marked(_mark(placed)):
            model = placed.target.open(placed.options.runtime_options)
    except (DeviceError, UnsupportedModelError, MissingDependencyError) as error:
        if placed.others is None:
            raise
        raise TargetRefusedError(error) from error
    try:
        _require_unchanged(placed)
    except BaseException:
        model.close()
        raise
    return model


def _require_unchanged(placed: PlacedModels) -> None:
    source = placed.source
    if source.path.is_file() and source.identity != placed.identity:
        raise ModelFileError(
            f"{source.path} has changed while it was opened",
            remedy="Start again once it is written.",
        )


def _mark(placed: PlacedModels) -> Path:
    name = f"{placed.target.runtime.name}-{placed.identity}"
    return cache_directory() / "opening" / name


@contextmanager
def _marked(mark: Path) -> Iterator[None]:
    """What cannot be written costs no more than the mark."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(os.getpid()), encoding="ascii")
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def _try_apart(placed: PlacedModels) -> None:
    """Raises DeviceError where opening the model ends the process that does it."""
    if not _is_left(_mark(placed)):
        return
    runtime = placed.target.runtime.name
    place = described(placed.source.model, processor(runtime), placed.options.runtime_options)
    try:
        isolated(open_described, json.dumps(place), timeout_s=_TRIAL_S)
    except IsolatedError as error:
        raise DeviceError(
            f"{runtime} does not survive opening {placed.source.name}: {error}",
            remedy="Use another runtime, or another version of its library.",
        ) from None


def _is_left(mark: Path) -> bool:
    """Says whether the process is no more that made the mark. Never on Windows, where to ask for a
    process may end it."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(int(mark.read_text(encoding="ascii")), 0)
    except (ProcessLookupError, ValueError):
        return True
    except OSError:  # there is no mark, or the process is another user's
        return False
    return False


def open_described(place: str) -> None:
    """Opens a model in the other process. Raises an EdgeSpecError."""
    candidate = candidate_of(json.loads(place))
    candidate.prepared.open(candidate.options).close()


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
    pair: PairKey | None = None  # the target and its first draft


def open_models(
    placed: PlacedModels, open_target: Callable[[], Model], opened: ExitStack
) -> OpenModels:
    """opened: closes all of them. Raises an EdgeSpecError, and TargetRefusedError where another
    runtime may be asked for the target."""
    options, target = placed.options, placed.target
    key = profile_key(placed.source, target, options.runtime_options)
    profile = load_profile(key, target.profiles)
    findings, pair = None, None
    if placed.drafts:
        how = options.draft_runtime_options
        findings = load_pair(key, profile_key(placed.draft_sources[0], placed.drafts[0], how))
        pair = pair_key(placed.source, placed.draft_sources[0])
    drafts = []
    for draft in _open_drafts(placed, findings, pair):
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
    if drafts and drafts[0].step_s and costs().is_scaled and drafts[0].step_s >= costs().at(1):
        _log.warning(
            "a step of the draft %s takes %.2f times as long as one of its target: it is asked "
            "only where that pays; choose a smaller one",
            options.drafts[0],
            drafts[0].step_s / costs().at(1),
        )
    begins = findings is None or findings.overlap_saves_s(costs(), drafts[0].step_s) > 0
    return OpenModels(loaded, drafts, drafters, context, costs, key, begins, pair)


def _open_drafts(
    placed: PlacedModels, findings: PairFindings | None, pair: PairKey | None
) -> Iterator[Draft]:
    """findings: of the first one beside its target. pair: of both."""
    options = placed.options
    above = placed.target
    known = None if pair is None else first_acceptance(pair)
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
    options: LoadOptions,
) -> DrafterContext:
    """costs, measured: of the target's rows; the second in seconds, for searches that were asked
    for and are themselves measurements."""
    source, target = placed.source, placed.target
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


def check_capabilities(name: str, runtime: str, model: Model, options: LoadOptions) -> None:
    """Refuses here what the model cannot do, so that nothing fails in the middle of a text. One
    line tells of drafters that were asked for by name, and whose draft tokens cannot branch here.

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
        traits = factory.traits_of(options.drafter)
        branching = [each for each, declared in traits.items() if declared.trees]
        if branching:
            _log.warning(
                "%s on %s is drafted for in chains, not in the trees of %s: %s",
                name,
                runtime,
                ", ".join(branching),
                model.capabilities.why_no_trees or "rows of its passes cannot branch",
            )
