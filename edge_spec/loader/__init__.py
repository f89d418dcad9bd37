"""`edge_spec.load`: from a model's name and what a user asked for to an engine, in four stages.

resolve: which models are meant, and what is asked of them. place: which runtime and devices each
gets. open: their weights are read. compose: the engine around them.

The package is called loader, not load: a module `edge_spec.load` would take the place of the
function `edge_spec.load` as soon as anything imported it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol

from edge_spec.core.model import Model, Progress
from edge_spec.drafters import factory
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import ANSWER_NAMES, OTHER_ANSWER_NAMES, how_to_give
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.loader.compose import Learner, StartLearning, compose_engine
from edge_spec.loader.open import (
    OpenModels,
    TargetOpening,
    TargetRefusedError,
    check_capabilities,
    open_models,
    open_target,
)
from edge_spec.loader.place import (
    PlacedModels,
    place_models,
    place_on_next,
    resolve_options,
    trained_options,
)
from edge_spec.models.asked_options import (
    MODEL_ALSO,
    MODEL_HELP,
    AskedOptions,
    LoadArguments,
    declared_options,
    meant,
    require_type,
)
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source

__all__ = [
    "Learner",
    "LoadOptions",
    "StartLearning",
    "check_capabilities",
    "load",
    "load_asked",
    "load_engine",
]

_log = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_PROGRESS_HELP = "It is called with what is being done and the share that is done."
Screen = Callable[[PlacedModels], None]  # refuses what is asked of models before they are opened


def load_asked(
    model: str,
    asked: AskedOptions,
    progress: Progress,
    *,
    measure_when_idle: bool = False,
    keeps_answers: bool = True,
    screen: Screen | None = None,
    needs_chat: bool = False,
    learning: StartLearning | None = None,
) -> Engine:
    """A drafter that was trained here for the model drafts where nobody else was asked to.

    Raises as `load_engine` does, what `screen` and `learning` raise, and UnsupportedModelError
    where a chat template is needed and there is none; keeps_answers: for later runs."""
    source = Source(model, progress)

    def opened(how: AskedOptions) -> Engine:
        options = resolve_options(source, how, keeps_answers)
        return _load(source, options, measure_when_idle, learning, screen, needs_chat)

    trained = trained_options(source, asked) if learning is None else None
    if trained is not None:
        try:
            return opened(trained)
        except EdgeSpecError as error:  # on another runtime, say
            _log.warning(
                "what was trained for %s does not draft: %s. --draft none leaves it out",
                source.name,
                error.shown,
            )
    return opened(asked)


def load_engine(
    model: str, options: LoadOptions, progress: Progress, measure_when_idle: bool = False
) -> Engine:
    """measure_when_idle: makes the model's profile between answers, where the cache has none.

    Raises an EdgeSpecError that names what is missing or wrong.
    """
    return _load(Source(model, progress), options, measure_when_idle)


def _load(
    source: Source,
    options: LoadOptions,
    measure_when_idle: bool,
    learning: StartLearning | None = None,
    screen: Screen | None = None,
    needs_chat: bool = False,
) -> Engine:
    with ExitStack() as opened:  # closes what is open already where the rest fails
        placed = place_models(source, options, needs_chat, makes_room=screen is not None)
        target = TargetOpening(placed)
        opened.callback(target.close)
        if needs_chat:
            placed.target.text.template()
        if screen is not None:
            screen(placed)
        placed, models = _opened(placed, target, opened, makes_room=screen is not None)
        engine = compose_engine(placed, models, opened, measure_when_idle, learning)
        opened.pop_all()
    return engine


def _opened(
    placed: PlacedModels, target: TargetOpening, opened: ExitStack, makes_room: bool
) -> tuple[PlacedModels, OpenModels]:
    """Opens the models, the target on the first runtime that does not fail. target: that of the
    first one."""
    open_it: Callable[[], Model] = target.take
    while True:
        with ExitStack() as tried:
            try:
                models = open_models(placed, open_it, tried)
            except TargetRefusedError as refused:
                placed = place_on_next(placed, refused.error, makes_room)
                open_it = partial(open_target, placed)
            else:
                opened.enter_context(tried.pop_all())
                return placed, models


def _with_arguments(
    arguments: Callable[_Arguments, LoadArguments],
) -> Callable[[Callable[[LoadArguments], Engine]], Callable[_Arguments, Engine]]:
    """Gives a function the arguments that the class takes, for type checkers, for `help` and in
    its docstring."""

    def decorate(opening: Callable[[LoadArguments], Engine]) -> Callable[_Arguments, Engine]:
        options = declared_options(AskedOptions)
        # With types instead of what the command line needs beside them.
        types = {name: each.type for name, each in options.items()}
        known = inspect.signature(LoadArguments).parameters.values()
        signature = inspect.Signature(
            [each.replace(annotation=types.get(each.name, each.annotation)) for each in known],
            return_annotation=Engine,
        )
        said = [f"model: {MODEL_HELP}"]
        said += [f"{name}: {each.option.help}" for name, each in options.items()]

        @wraps(opening)
        def load(*given: _Arguments.args, **named: _Arguments.kwargs) -> Engine:
            for name in named:
                if name not in signature.parameters:
                    raise _unknown(name)
            asked = arguments(*given, **named)
            require_type("model", asked.model, str | Path, MODEL_HELP)
            for name, each in options.items():
                require_type(name, getattr(asked, name), each.type, each.option.help)
            require_type("progress", asked.progress, Callable[..., None] | None, _PROGRESS_HELP)
            return opening(asked)

        load.__doc__ = "\n    ".join([opening.__doc__ or "", *said])
        load.__signature__ = signature  # type: ignore[attr-defined]
        return load

    return decorate


def _unknown(name: str) -> UsageError:
    """Returns the refusal of an argument that `load` does not have, with the one that is meant:
    users write options as the command line has them, or other libraries."""
    options = declared_options(AskedOptions)
    flags = {each.flag.removeprefix("--"): known for known, each in options.items()}
    others = {other: known for known, each in options.items() for other in each.option.also}
    others |= dict.fromkeys(MODEL_ALSO, "model") | flags | OTHER_ANSWER_NAMES
    found = meant(name, [*options, "model", "progress", *ANSWER_NAMES], others)
    remedy = "help(edge_spec.load) lists its options."
    if found is not None and found in options:
        remedy = f"Did you mean {found}, which is {options[found].flag} on the command line?"
    elif found in ANSWER_NAMES:
        remedy = how_to_give(found)
    elif found is not None:
        remedy = f"Did you mean {found}?"
    return UsageError(f"load has no option {name!r}", remedy=remedy)


@_with_arguments(LoadArguments)
def load(asked: LoadArguments) -> Engine:
    """Opens a model for `chat` and `generate`; the first use of one converts it into the cache.

    progress: is called with what is being done and the share that is done; all other options are
    those of the command line, which docs/cli.md explains. A model runs where `edge-spec plan` has
    measured it to be fastest, unless options say otherwise. One that was never measured is measured
    while it is idle. Raises an EdgeSpecError that names what is missing or wrong.
    """
    progress = asked.progress or (lambda what, fraction: None)
    return load_asked(str(asked.model), asked, progress, measure_when_idle=True)


class Opening(Protocol):
    """Opens a model."""

    def __call__(self, *, report: Progress | None, screen: Screen | None) -> Engine:
        """report: None shows the progress to whoever started the program. screen: is shown the
        models before their weights are read. Raises an EdgeSpecError, and what the two raise."""


@dataclass(frozen=True)
class ModelOnDemand:
    """A model that is opened when it is asked for, and may be closed and opened again.

    name: what lists and answers call it; aliases: what requests may call it, too; plan: what
    `edge-spec plan` keeps of it, as `edge-spec plan --json` prints it.
    """

    name: str
    open: Opening
    aliases: tuple[str, ...] = ()
    plan: Callable[[], Mapping[str, Any] | None] = lambda: None


def options_of_others(asked: AskedOptions) -> AskedOptions:
    """Returns the options of all models but the first, where one command names several: a plan, a
    draft that is named and the layers of early exit are of one model."""
    asked = replace(asked, plan=None, exit_layer=None)
    named = [asked.draft] if isinstance(asked.draft, str) else asked.draft or []
    if not set(named) - {"auto", "none"}:
        return asked
    traits = factory.traits_of(asked.drafter).values()
    needs_draft = any(each.draft_model for each in traits)
    return replace(
        asked,
        draft=None,
        draft_runtime="auto",
        draft_device=None,
        draft_threads=None,
        drafter="auto" if needs_draft else asked.drafter,
    )
