"""Makes drafters: what they may build on, and the entry points of this package's own.

An entry point of the group `edge_spec.drafters` is a function that takes a `DrafterContext` and
returns a `Drafter`; `declares` says what it makes. A class with `traits` of its own, called with
the context, will do as well.
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
    from edge_spec.drafters.draft.self_draft import Search, TargetPart
    from edge_spec.drafters.heads.assistant import AssistantNetwork
    from edge_spec.drafters.heads.dflash import DFlashNetwork
    from edge_spec.drafters.heads.independent import MedusaNetwork
    from edge_spec.drafters.heads.layers import EagleNetwork
    from edge_spec.drafters.lookup.answers import KeptAnswers
    from edge_spec.drafters.lookup.corpus_index import CorpusIndex

    HeadNetwork = EagleNetwork | MedusaNetwork | DFlashNetwork | AssistantNetwork  # a trained head

_Made = Callable[["DrafterContext"], Drafter]

_NOTHING = DrafterTraits()

_log = logging.getLogger(__name__)


def declares(traits: DrafterTraits) -> Callable[[_Made], _Made]:
    """Says of a function what the drafters that it makes cost and need."""

    def declare(make: _Made) -> _Made:
        make.traits = traits  # type: ignore[attr-defined]
        return make

    return declare


@dataclass(frozen=True)
class DrafterContext:
    """The target as drafters see it, and the user's options for them."""

    vocab_size: int  # of the target
    tokens: Callable[[], Mapping[str, int]] = dict  # its vocabulary: token -> id
    answers_file: Path | None = None  # where they are kept from one run to the next
    keeps_answers: bool = True  # those of this run, too
    remember: bool = False  # "auto" drafts from them
    kept_answers: dict[Path, KeptAnswers] = field(default_factory=dict)  # of all conversations on
    # the target, by their file
    corpora: Sequence[CorpusIndex] = ()
    draft_n_max: int | None = None  # draft tokens a round
    window: WindowSize | None = None
    fill: JacobiInit | None = None  # of Jacobi blocks
    searches: Mapping[str, Search] = field(default_factory=dict)  # of drafters that are a part of
    # the target, by their names
    parts: Mapping[str, TargetPart] = field(default_factory=dict)  # settled before
    drafts: Sequence[Draft] = ()  # the first drafts for the target, each other for the one before
    head: HeadNetwork | None = None
    cheap_rows: int = 1  # of a pass of the target, which hardly takes longer than one of a single
    # row


@dataclass(frozen=True)
class _Own:
    """A drafter of this package, of a module that is imported when it is made.

    make: is given the module.
    """

    traits: DrafterTraits
    home: str
    make: Callable[[Any, DrafterContext], Any]

    def __call__(self, context: DrafterContext) -> Any:
        return self.make(import_module(f"edge_spec.drafters.{self.home}"), context)


def _lookahead(module: Any, context: DrafterContext) -> Any:
    if context.window is None and context.draft_n_max is not None:
        return module.LookaheadDrafter(WindowSize.within(context.draft_n_max + 1))
    return module.LookaheadDrafter(context.window or DEFAULT_SIZE)


def _answers(module: Any, context: DrafterContext) -> Any:
    """Raises UsageError where there is no place for its file."""
    if context.answers_file is None:
        raise UsageError(
            "the drafter answers needs a file", remedy="Open the model by its name or path."
        )
    path, opened = context.answers_file, context.kept_answers
    if path not in opened:
        vocabulary = replace(Vocabulary.of(context.tokens()), size=context.vocab_size)
        opened.setdefault(path, module.KeptAnswers(path, vocabulary, context.keeps_answers))
    return module.AnswersDrafter(opened[path])


def _cascade(name: str, context: DrafterContext, lowest: Sequence[StageDrafter] = ()) -> Drafter:
    below = lowest
    for draft in reversed(context.drafts[1:]):
        below = [draft.make_level(below, name)]
    return context.drafts[0].make_drafter(below, name)


def _self_drafter(name: str, module: Any, context: DrafterContext) -> Any:
    if name not in context.searches:
        raise UsageError(
            f"the drafter {name} needs the target that it is a part of",
            remedy="Open the model with edge_spec.load.",
        )
    return module.SelfDrafter(name, context.searches[name], context.parts.get(name))


suffix = _Own(TRAITS["suffix"], "lookup.suffix", lambda module, _: module.SuffixDrafter())
recycling = _Own(
    TRAITS["recycling"], "lookup.recycling", lambda module, _: module.RecyclingDrafter()
)
corpus = _Own(
    TRAITS["corpus"],
    "lookup.answers",
    lambda module, context: module.CorpusDrafter(context.corpora),
)
answers = _Own(TRAITS["answers"], "lookup.answers", _answers)
lookahead = _Own(TRAITS["lookahead"], "jacobi", _lookahead)
jacobi = _Own(
    TRAITS["jacobi"],
    "jacobi",
    lambda module, context: module.JacobiDrafter(
        context.fill or JacobiInit.NGRAM, context.draft_n_max or DEFAULT_BLOCK
    ),
)
draft_model = _Own(
    TRAITS["draft-model"], "draft.draft_model", lambda _, context: _cascade("draft-model", context)
)
# The draft, with suffix lookup as its own drafter.
cascade = _Own(
    TRAITS["cascade"],
    "lookup.suffix",
    lambda module, context: _cascade("cascade", context, [module.SuffixDrafter()]),
)
medusa = _Own(
    TRAITS["medusa"],
    "heads.independent",
    lambda module, context: module.MedusaDrafter(context.head),
)
dflash = _Own(
    TRAITS["dflash"], "heads.dflash", lambda module, context: module.DFlashDrafter(context.head)
)
eagle = _Own(
    TRAITS["eagle"], "heads.eagle", lambda module, context: module.EagleDrafter(context.head)
)
assistant = _Own(
    TRAITS["assistant"],
    "heads.assistant",
    lambda module, context: module.AssistantDrafter(context.head),
)
early_exit = _Own(TRAITS["early-exit"], "draft.self_draft", partial(_self_drafter, "early-exit"))
layer_skip = _Own(TRAITS["layer-skip"], "draft.self_draft", partial(_self_drafter, "layer-skip"))


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
    """Returns what each of the drafters declares whose names are joined by commas. One that
    declares nothing, or is not installed, costs and needs nothing; "auto" and "none" are no
    drafters. Raises MissingDependencyError for one that cannot be loaded."""
    names = [name.strip() for name in chosen.split(",")]
    if names in (["auto"], ["none"]):
        return {}
    points = entry_points.installed("drafters")
    return {
        name: _traits(entry_points.load("drafters", points[name])) if name in points else _NOTHING
        for name in names
    }


def installed_traits() -> dict[str, DrafterTraits]:
    """Returns what all installed drafters declare, by name. One that cannot be loaded is left out,
    which is logged; who asks for it by name reads why."""
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
    """The names that "auto" stands for, where there are drafts, corpora and a head of a kind:
    those that declare it and need nothing else. remember: those that keep answers, too, which have
    to be asked for. A draft model or a head drafts beside those that
    look up the text: they cost nothing, and where a draft does not pay, they still do. cheap_rows:
    of a pass, which take hardly longer than one: some need them to be of use."""
    rows = 1 if drafts or head else cheap_rows  # beside these it was not compared
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
    """New drafters for "auto", "none", or names joined by commas.

    Raises UsageError for a name that is not installed or that the context lacks something for.
    """
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
