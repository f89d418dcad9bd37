"""Makes drafters.

An entry point of the group `edge_spec.drafters` is a function from `DrafterContext` to `Drafter`;
`declares` sets its traits. A class with `traits` that takes the context works too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.core import entry_points
from edge_spec.core.modes import JacobiInit
from edge_spec.drafters.jacobi import DEFAULT_BLOCK, DEFAULT_SIZE, WindowSize
from edge_spec.drafters.protocol import TRAITS, Drafter, DrafterTraits
from edge_spec.errors import UsageError
from edge_spec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from edge_spec.drafters.composite import StageDrafter
    from edge_spec.drafters.draft.draft_model import Draft
    from edge_spec.drafters.draft.self_draft import TargetPart
    from edge_spec.drafters.heads.assistant import AssistantNetwork
    from edge_spec.drafters.heads.independent import MedusaNetwork
    from edge_spec.drafters.heads.layers import LayersNetwork
    from edge_spec.drafters.lookup.answers import KeptAnswers
    from edge_spec.drafters.lookup.corpus_index import CorpusIndex

    HeadNetwork = LayersNetwork | MedusaNetwork | AssistantNetwork  # a trained head

_Made = Callable[["DrafterContext"], Drafter]

_NOTHING = DrafterTraits()

_log = logging.getLogger(__name__)


def declares(traits: DrafterTraits) -> Callable[[_Made], _Made]:
    """Declare what the drafters that a function makes cost and need."""

    def declare(make: _Made) -> _Made:
        make.traits = traits  # type: ignore[attr-defined]
        return make

    return declare


@dataclass(frozen=True)
class DrafterContext:
    """The target as drafters see it, and the user's options for drafters."""

    vocab_size: int  # of the target
    tokens: Callable[[], Mapping[str, int]] = dict  # vocabulary: token -> id
    answers_file: Path | None = None  # where answers are kept across runs
    keeps_answers: bool = True  # save this run's answers
    remember: bool = False  # "auto" drafts from kept answers
    kept_answers: dict[Path, KeptAnswers] = field(default_factory=dict)
    corpora: Sequence[CorpusIndex] = ()
    draft_n_max: int | None = None  # per round
    window: WindowSize | None = None
    fill: JacobiInit | None = None  # of Jacobi blocks
    parts: Mapping[str, TargetPart] = field(default_factory=dict)
    drafts: Sequence[Draft] = ()  # the first for the target, each other for the one before it
    head: HeadNetwork | None = None
    cheap_rows: int = 1


def _own(name: str, home: str, make: Callable[[Any, DrafterContext], Any]) -> _Made:
    """Return a maker of a drafter of this package, imported on first use. home: "module:class".
    make: receives the class."""

    @declares(TRAITS[name])
    def made(context: DrafterContext) -> Drafter:
        module, _, kind = home.partition(":")
        found = getattr(import_module(f"edge_spec.drafters.{module}"), kind)
        drafter: Drafter = make(found, context)
        return drafter

    return made


def _lookahead(kind: Any, context: DrafterContext) -> Any:
    if context.window is None and context.draft_n_max is not None:
        return kind(WindowSize.within(context.draft_n_max + 1))
    return kind(context.window or DEFAULT_SIZE)


def _answers(kind: Any, context: DrafterContext) -> Any:
    from edge_spec.drafters.lookup.answers import KeptAnswers

    if context.answers_file is None:
        raise UsageError(
            "the drafter answers needs a file", remedy="Open the model by its name or path."
        )
    path, opened = context.answers_file, context.kept_answers
    if path not in opened:
        vocabulary = replace(Vocabulary.of(context.tokens()), size=context.vocab_size)
        opened.setdefault(path, KeptAnswers(path, vocabulary, context.keeps_answers))
    return kind(opened[path])


def _cascade(name: str, context: DrafterContext, lowest: Sequence[StageDrafter] = ()) -> Drafter:
    below = lowest
    for draft in reversed(context.drafts[1:]):
        below = [draft.make_level(below, name)]
    return context.drafts[0].make_drafter(below, name)


def _part(kind: Any, context: DrafterContext, name: str) -> Any:
    if name not in context.parts:
        or_named = ", or name an exit with --exit-layer" if name == "early-exit" else ""
        raise UsageError(
            f"it is not known which layers the drafter {name} leaves out",
            remedy=f"Search for them with edge-spec tune-skip{or_named}.",
        )
    return kind(name, context.parts[name])


def _with_head(kind: Any, context: DrafterContext) -> Any:
    return kind(context.head)


suffix = _own("suffix", "lookup.suffix:SuffixDrafter", lambda kind, _: kind())
recycling = _own("recycling", "lookup.recycling:RecyclingDrafter", lambda kind, _: kind())
corpus = _own("corpus", "lookup.answers:CorpusDrafter", lambda kind, context: kind(context.corpora))
answers = _own("answers", "lookup.answers:AnswersDrafter", _answers)
lookahead = _own("lookahead", "jacobi:LookaheadDrafter", _lookahead)
jacobi = _own(
    "jacobi",
    "jacobi:JacobiDrafter",
    lambda kind, context: kind(
        context.fill or JacobiInit.NGRAM, context.draft_n_max or DEFAULT_BLOCK
    ),
)
# The draft makes these two; the second has suffix lookup as its own drafter.
draft_model = _own(
    "draft-model",
    "draft.draft_model:DraftModelDrafter",
    lambda _, context: _cascade("draft-model", context),
)
cascade = _own(
    "cascade",
    "lookup.suffix:SuffixDrafter",
    lambda kind, context: _cascade("cascade", context, [kind()]),
)
medusa = _own("medusa", "heads.independent:MedusaDrafter", _with_head)
dflash = _own("dflash", "heads.dflash:DFlashDrafter", _with_head)
eagle = _own("eagle", "heads.eagle:EagleDrafter", _with_head)
assistant = _own("assistant", "heads.assistant:AssistantDrafter", _with_head)
WITH_PARTS = ("early-exit", "layer-skip")
early_exit = _own("early-exit", "draft.self_draft:SelfDrafter", partial(_part, name="early-exit"))
layer_skip = _own("layer-skip", "draft.self_draft:SelfDrafter", partial(_part, name="layer-skip"))


def missing_draft(name: str) -> UsageError:
    return UsageError(
        f"the drafter {name} needs a second model", remedy="Name it with --draft MODEL."
    )


def missing_head(name: str) -> UsageError:
    return UsageError(
        f"the drafter {name} needs a trained head of its kind",
        remedy="Name its directory with --draft DIR.",
    )


def traits_of(chosen: str) -> dict[str, DrafterTraits]:
    """Return the traits of the named drafters, joined by commas. Empty for "auto" and "none";
    defaults for one that is not installed. Raises MissingDependencyError."""
    names = [name.strip() for name in chosen.split(",")]
    if names in (["auto"], ["none"]):
        return {}
    points = entry_points.installed("drafters")
    return {
        name: _traits(entry_points.load("drafters", points[name])) if name in points else _NOTHING
        for name in names
    }


def installed_traits() -> dict[str, DrafterTraits]:
    """Return the traits of all installed drafters that can be loaded."""
    found = {}
    for name, point in sorted(entry_points.installed("drafters").items()):
        try:
            found[name] = _traits(point.load())
        except Exception as error:
            _log.info("the drafter %s cannot be loaded: %s", name, error)
    return found


def auto_drafters(
    *, drafts: bool, corpora: bool, head: str = "", cheap_rows: int = 1, remember: bool = False
) -> list[str]:
    """Return the names that "auto" stands for: those that declare it and need only what is there.

    Lookup drafters run besides a draft model or head: they are free and pay where a draft does not.
    cheap_rows: rows of a pass that cost hardly more than one.
    """
    rows = 1 if drafts or head else cheap_rows  # the combination was not compared
    declared = sorted(installed_traits().items(), key=lambda each: each[1].auto_rows)
    found = {name: each for name, each in declared if each.auto and each.auto_rows <= rows}
    chosen = [name for name, each in found.items() if each.needs_text_alone]
    if drafts:
        chosen += [name for name, each in found.items() if each.draft_model and not each.corpora]
    if head:
        chosen += [name for name, each in found.items() if each.head == head]
    if corpora:
        chosen += [name for name, each in found.items() if each.corpora and not each.draft_model]
    if remember:
        chosen += [name for name, each in declared if each.remembers and each.needs_text_alone]
    return chosen


def load_drafters(chosen: str, context: DrafterContext) -> list[Drafter]:
    """Make drafters for "auto", "none", or names joined by commas. Raises UsageError for a name
    that is not installed or lacks something in the context."""
    if chosen == "none":
        return []
    wanted = [name.strip() for name in chosen.split(",")]
    if chosen == "auto":
        wanted = auto_drafters(
            drafts=bool(context.drafts),
            corpora=bool(context.corpora),
            head="" if context.head is None else context.head.kind,
            cheap_rows=context.cheap_rows,
            remember=context.remember,
        )
    if len(set(wanted)) < len(wanted):
        raise UsageError(f"{chosen} names a drafter twice", remedy="Name each once.")
    makers = [entry_points.load_plugin("drafters", name) for name in wanted]
    return [_made(name, make, context) for name, make in zip(wanted, makers, strict=True)]


def _made(name: str, make: Callable[[DrafterContext], Any], context: DrafterContext) -> Drafter:
    declared = _traits(make)
    if declared.draft_model and not context.drafts:
        raise missing_draft(name)
    if declared.head and (context.head is None or context.head.kind != declared.head):
        raise missing_head(name)
    if declared.corpora and not context.corpora:
        raise UsageError(
            f"the drafter {name} needs a text",
            remedy="Name a file or directory with --corpus PATH.",
        )
    drafter = make(context)
    if not isinstance(drafter, Drafter):
        raise UsageError(
            f"the drafter {name} is of a class that does not inherit from Drafter",
            remedy="Have it inherit from edge_spec.drafters.protocol.Drafter.",
        )
    if hasattr(make, "traits"):
        drafter.traits = declared
    return drafter


def _traits(make: object) -> DrafterTraits:
    traits: DrafterTraits = getattr(make, "traits", _NOTHING)
    return traits
