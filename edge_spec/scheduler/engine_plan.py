"""Choose the runtime for a model and its drafters: `plan_engine` lists the plans, best first.

Plans follow from headers, options and what `edge-spec plan` measured; planning itself measures,
converts and opens nothing. A place measured to be clearly faster comes first, then plans without a
conversion. The caller tries the next plan if opening one fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.modes import DraftOverlap
from edge_spec.drafters import factory
from edge_spec.errors import (
    EdgeSpecError,
    MissingDependencyError,
    UnsupportedModelError,
    install,
    readable,
)
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import is_bundle, open_bundle
from edge_spec.models.devices import share_chip
from edge_spec.models.draft_choice import named_options, trained_options
from edge_spec.models.model_plan import ModelPlan, Refusal, choose, ways_to_run
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.cost import RowCosts, forecast_speedup
from edge_spec.scheduler.profile import (
    SECONDS,
    Profile,
    ProfileKey,
    kept_profiles,
    was_busy,
)
from edge_spec.scheduler.row_findings import holds, recall_costs, shapes_of

_log = logging.getLogger(__name__)
_MARGIN = 1.05  # the faster one's time; a smaller gain may be other load
_CONVERTED = 1.1  # if a conversion would replace the file and change the text
_READS_FILES = "llamacpp"
_ACCEPTANCE = 0.3  # of looked-up draft tokens
_DRAFT_TOKENS = range(8)
# Time of a pass beyond a plain step, in plain steps, up to which its rows are cheap. On recorded
# texts of a 1.5B model (benchmarks/simulate.py, costs of a Zen 5), recycling added 8% tokens/s
# where eight rows took 1.2 steps (AVX-512 VNNI) and lost 4% at 2.2 (AVX2). A real run showed no
# difference at 1.5.
_CHEAP = 0.35
_SHOWN_ROWS = 8
_UPKEEP_S = 0.0005  # Python time of a round


@dataclass(frozen=True)
class EnginePlan:
    """One way to run a model: its runtime, its device and its drafters. is_own: the drafter was
    trained on this machine for the model, not asked for."""

    options: LoadOptions
    target: ModelPlan
    drafts: tuple[ModelPlan, ...] = ()
    is_own: bool = False

    @property
    def source(self) -> Source:
        return self.target.source

    @cached_property
    def drafter(self) -> str:
        """Return the drafters' names, joined by commas; "none" where nothing drafts."""
        options = self.options
        if options.drafter.strip() != "auto":
            return options.drafter
        head = ""
        if options.head is not None and (config := config_of(self.target)) is not None:
            head = runtimes.open_head(options.head, config, has_weights=False).drafted_by
        return ",".join(
            factory.auto_drafters(
                drafts=bool(self.drafts),
                corpora=bool(options.corpora),
                head=head,
                cheap_rows=self.cheap_rows,
                remember=options.remember,
            )
        )

    @cached_property
    def costs(self) -> RowCosts:
        """Return the target's pass costs as measured, else the usual ones of its kernels."""
        device = ",".join(self.target.how.providers)
        usual = recall_costs(runtimes.own_kernels(self.target.name), device, {})
        return next(_known_costs(self.target, kept_profiles(self.target.source)), usual)

    @cached_property
    def cheap_rows(self) -> int:
        """Return how many rows are cheap enough for drafters that need many; 1 if a model drafts
        (untested)."""
        alone = not self.drafts and self.options.head is None
        return widest_cheap(self.costs) if alone else 1

    @property
    def drafts_elsewhere(self) -> bool:
        """Return whether, by their names, drafts use a device that the target does not."""
        how = self.target.how
        targets = how.providers or ("gpu" if how.gpu_layers or how.rpc_servers else "cpu",)
        drafts = [name for each in self.drafts for name in each.how.providers or ("cpu",)]
        return bool(drafts) and not share_chip(targets, drafts)

    @property
    def overlap(self) -> DraftOverlap:
        """Return whether the first draft continues during verification; AUTO: if it pays."""
        asked = self.options.overlap
        is_idle = asked is DraftOverlap.AUTO and not self.drafts_elsewhere
        return DraftOverlap.OFF if is_idle else asked

    @property
    def anticipates(self) -> bool:
        return self.overlap is not DraftOverlap.OFF

    def explain(self) -> tuple[str, ...]:
        """Return up to three lines: the runtime and why, the drafters and why, what would be
        faster."""
        told = (f"engine: {self._engine()}", f"drafter: {self._drafter()}")
        better = missing_reader(self.source) or self._better_drafter()
        return (*told, f"faster: {better}") if better else told

    def _engine(self) -> str:
        how = self.target.how
        place = self.target.name
        if how.providers:
            place += f" on {','.join(how.providers)}"
        if how.threads is not None:
            place += f", {how.threads} thread{'s' * (how.threads > 1)}"
        if self.target.refusals:
            refused = "; ".join(
                f"{each.runtime} cannot run it ({each.error.shown})"
                for each in self.target.refusals
            )
            return f"{place}, since {refused}"
        return f"{place} ({self.target.why})" if self.target.why else place

    def _drafter(self) -> str:
        asked = self.options.drafter.strip() != "auto"
        if self.drafter == "none":
            return "none: nothing is drafted, as asked for" if asked else "none"
        names = self.drafter.replace(",", ", ")
        paid = f"{'each' if ',' in names else 'it'} is used while it pays off"
        if self.drafts:
            drafts = ", then ".join(f"{each.source.name} on {each.name}" for each in self.drafts)
            return f"{names}, with the draft {drafts}; {paid}"
        if self.options.head is not None:
            whose = "trained here" if self.is_own else "that was named"
            return f"{names}, the head {whose}; {paid}"
        if asked:
            return f"{names}, as asked for"
        share = self.costs.at(_SHOWN_ROWS) / self.costs.at(1)
        known = "takes" if self.costs.is_scaled else "usually takes"
        rows = f"a pass of {_SHOWN_ROWS} rows {known} {share:.1f} plain steps here"
        return f"{names} ({rows}); {paid}"

    def _better_drafter(self) -> str:
        if self.options.drafter == "none":
            return "drafting, which --drafter none turns off"
        if self.drafts or self.options.head is not None or self.options.drafter != "auto":
            return ""
        model = readable(self.source.model)
        return (
            "a smaller model of the same family, with --draft, or a head that "
            f"`edge-spec distill {model}` trains"
        )


def plan_engine(source: Source, options: LoadOptions) -> list[EnginePlan]:
    """List the ways to run a model, best first.

    Raises as `Source.path` does; ModelFileError or UnsupportedModelError for an unreadable header;
    and as `choose` does for a draft that nothing runs.
    """
    if options.runtime != "auto":
        runtimes.load_runtime(options.runtime)  # fail before anything is downloaded
    ways = ways_to_run(source, options.runtime, options.runtime_options, options.export)
    ranked, drafts = rank_ways(ways, is_open(options)), _draft_plans(source, options)
    return [EnginePlan(options, each, drafts) for each in ranked]


def plans_for(
    source: Source, asked: AskedOptions, *, keeps_answers: bool = True, uses_trained: bool = True
) -> list[EnginePlan]:
    """List the ways to run a model as the user asked, drafting with what was trained here by
    default. Raises as `plan_engine` and `named_options` do."""
    trained = trained_options(source, asked) if uses_trained else None
    if trained is not None:
        try:
            options = named_options(source, trained, keeps_answers)
            return [replace(each, is_own=True) for each in plan_engine(source, options)]
        except EdgeSpecError as error:
            tell_untrained(source, error)
    return plan_engine(source, named_options(source, asked, keeps_answers))


def tell_untrained(source: Source, error: EdgeSpecError) -> None:
    """Warn that a drafter trained here cannot be used."""
    _log.warning(
        "what was trained for %s does not draft: %s. --draft none leaves it out",
        source.name,
        error.shown,
    )


def choose_plan(
    plans: Sequence[EnginePlan], refusals: Sequence[Refusal] = ()
) -> tuple[EnginePlan, list[EnginePlan]]:
    """Return the first plan whose runtime can run its model, by headers, and the plans after it.
    Raises as `choose` does."""
    chosen, left = choose([each.target for each in plans], refusals)
    at = 0 if chosen.is_only else len(plans) - len(left) - 1
    return replace(plans[at], target=chosen), list(plans[at + 1 :])


def is_open(options: LoadOptions) -> bool:
    """Return True if measurements may decide: no option fixes the place or invalidates them."""
    how = replace(options.runtime_options, context_length=None, takes_turns=False)
    draft = options.draft_runtime, options.draft_providers, options.draft_threads
    asked = (options.runtime, how, options.gpu_layers, draft)
    return (
        asked == ("auto", RuntimeOptions(), None, ("auto", (), None))
        and options.export == ExportOptions()
        and not (options.exact or options.draft_overlap != LoadOptions().draft_overlap)
        and len(options.drafts) <= 1
        and options.head is None
    )


def _draft_plans(source: Source, options: LoadOptions) -> tuple[ModelPlan, ...]:
    how = options.draft_runtime_options
    found = []
    for name in options.drafts:
        draft = Source(name, source.progress)
        ways = ways_to_run(draft, options.draft_runtime, how, options.export)
        is_free = (options.draft_runtime, options.draft_device, options.draft_threads)
        ranked = rank_ways(ways, is_free == ("auto", None, None) and is_open(options))
        found.append(choose(ranked)[0])
    return tuple(found)


# Ranking the ways to run one model.


def rank_ways(ways: Sequence[ModelPlan], may_move: bool = True) -> list[ModelPlan]:
    """Sort ways without a conversion first, then put a clearly faster measured way before them.

    may_move: also consider measured devices and thread counts. Raises as `Source.path` does, and
    ModelFileError or UnsupportedModelError for an unreadable header.
    """
    if ways[0].is_only and not may_move:
        return list(ways)
    profiles = list(kept_profiles(ways[0].source))
    usual = [_on_processor(way, profiles) for way in ways] if may_move else list(ways)
    if len(usual) > 1 and not _is_there(usual[0]):
        usual.sort(key=lambda way: not _is_there(way))
    every = [*usual, *(_measured_places(usual, profiles) if may_move else ())]
    known: dict[int, float] = {}  # seconds per token
    for i, way in enumerate(every):
        own = [_token_s(profile.costs()) for key, profile in profiles if _is_of(key, way)]
        if own:
            known[i] = min(own)
    first = 0
    for i in known:
        if _is_there(every[i]) and _is_faster(every[i], known[i], every[first], known.get(first)):
            first = i
    why = _reason(
        every[first], known.get(first), {every[i].name: known[i] for i in known if i != first}
    )
    others = [way for i, way in enumerate(usual) if i != first]
    return [replace(every[first], why=why), *others]


def _is_there(way: ModelPlan) -> bool:
    """Return True if nothing has to be converted; False if the library is missing."""
    with suppress(MissingDependencyError):
        return way.is_there
    return False


def _reads_own(way: ModelPlan) -> bool:
    with suppress(MissingDependencyError):
        return way.own is not None
    return False


def _is_faster(way: ModelPlan, seconds: float, than: ModelPlan, than_s: float | None) -> bool:
    changes_weights = _reads_own(than) and not _reads_own(way)
    if than_s is None:  # only `edge-spec plan` measures unusual places
        return bool(way.how.providers or way.how.threads) and not changes_weights
    return seconds * (_CONVERTED if changes_weights else _MARGIN) < than_s


def _reason(way: ModelPlan, seconds: float | None, others: Mapping[str, float]) -> str:
    """others: seconds per token of other runtimes."""
    why = []
    if _reads_own(way):
        why.append("it reads the file as it is")
    elif _is_there(way):
        why.append("the model is converted for it already")
    if seconds is not None and others:
        steps = ", ".join(f"{name} {step_s * 1e3:.1f} ms" for name, step_s in others.items())
        why.append(f"a token takes {seconds * 1e3:.1f} ms here ({steps})")
    return " and ".join(why) or "it is asked first, and converts the model"


def missing_reader(source: Source) -> str:
    """Return an install hint for the runtime that reads the file directly; "" if not needed. Raises
    as `Source.path` does."""
    if _READS_FILES in runtimes.installed_runtimes() or not source.path.is_file():
        return ""
    return (
        f"{_READS_FILES}, which reads the file as it is and is usually faster, is not installed. "
        f"{install(_READS_FILES)}"
    )


# What was measured here.


def config_of(way: ModelPlan) -> ModelConfig | None:
    """Return the model's shape; None for a checkpoint that no exporter knows."""
    path = way.own or way.source.path
    if path.is_file():
        return way.source.header.config
    if is_bundle(path):
        return open_bundle(path, hashed=False).config
    with suppress(UnsupportedModelError):
        return runtimes.open_checkpoint(path).config
    return None


def _is_of(key: ProfileKey, way: ModelPlan) -> bool:
    return key.runtime == way.name and _holds(key, way.how) and way.weights in (None, key.weights)


def _holds(key: ProfileKey, how: RuntimeOptions) -> bool:
    return holds(key, how) or holds(key, replace(how, takes_turns=False))


def _on_processor(way: ModelPlan, profiles: Sequence[tuple[ProfileKey, Profile]]) -> ModelPlan:
    """Name the processor explicitly if `edge-spec plan` measured it that way."""
    named = replace(way, how=replace(way.how, providers=("cpu",)), is_only=False)
    if way.how.providers or any(_is_of(key, way) for key, _ in profiles):
        return way
    return named if any(_is_of(key, named) for key, _ in profiles) else way


def _measured_places(
    ways: Sequence[ModelPlan], profiles: Sequence[tuple[ProfileKey, Profile]]
) -> Iterator[ModelPlan]:
    """Yield the ways on measured devices and threads. Only places that computed correctly have
    profiles."""
    by_name = {way.name: way for way in ways}
    for key, _ in profiles:
        if ways[0].is_only and key.runtime not in by_name:
            continue
        way = by_name.get(key.runtime) or replace(ways[0], name=key.runtime)
        how = replace(way.how, providers=tuple(filter(None, key.device.split(","))))
        how = replace(how, threads=key.threads)
        if (how.providers, how.threads) == (way.how.providers, way.how.threads):
            continue
        if _holds(key, how):
            yield replace(way, how=how, is_only=False)


def _known_costs(
    way: ModelPlan, profiles: Iterable[tuple[ProfileKey, Profile]]
) -> Iterator[RowCosts]:
    """Yield the model's own costs, else those of models of its shapes, in any format if
    unconverted."""
    own = [profile.costs() for key, profile in profiles if _is_of(key, way)]
    if own:
        yield from own
        return
    kept = [
        each
        for each in SECONDS.find()
        if each.key.runtime == way.name and each.key.shapes and not was_busy(each.disturbance)
    ]
    config = config_of(way) if kept else None
    if config is None:
        return
    for each in kept:
        key = each.key
        is_same = key.shapes == shapes_of(config) and way.weights in (None, key.weights)
        if is_same and _holds(key, way.how):
            yield recall_costs(key.kernels, key.device, each.value)


def _token_s(costs: RowCosts) -> float:
    """Return the seconds per token at the most profitable number of draft tokens."""
    gains = [forecast_speedup([_ACCEPTANCE] * num, costs, 0.0) for num in _DRAFT_TOKENS]
    return costs.at(1) / max(gains)


def widest_cheap(costs: RowCosts) -> int:
    return costs.widest_free(max(0.0, _CHEAP - _UPKEEP_S / costs.at(1)))
