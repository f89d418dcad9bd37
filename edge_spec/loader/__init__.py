"""`edge_spec.load`: from a model's name and what a user asked for to an engine, in four stages.

resolve: which models are meant, and what is asked of them. place: which runtime and devices each
gets. open: their weights are read. compose: the engine around them.

The package is called loader, not load: a module `edge_spec.load` would take the place of the
function `edge_spec.load` as soon as anything imported it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

from edge_spec.core.model import Progress
from edge_spec.engine.async_engine import awaited
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError
from edge_spec.loader.compose import Learner, StartLearning, compose_engine
from edge_spec.loader.open import check_capabilities, open_models
from edge_spec.loader.place import PlacedModels, place_models, resolve_options
from edge_spec.models.asked_options import MODEL_HELP, AskedOptions, LoadArguments
from edge_spec.models.option import declared_options
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source

__all__ = [
    "Learner",
    "LoadOptions",
    "StartLearning",
    "check_capabilities",
    "load",
    "load_asked",
    "load_async",
    "load_engine",
]

_Arguments = ParamSpec("_Arguments")
_ALIKE = 0.6  # of the letters of an option's name, from which on it may be what was meant
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
    """Raises as `load_engine` does, what `screen` and `learning` raise, and UnsupportedModelError
    where a chat template is needed and there is none; keeps_answers: for later runs."""
    source = Source(model, progress)
    options = resolve_options(source, asked, keeps_answers)
    return _load(source, options, measure_when_idle, learning, screen, needs_chat)


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
        if screen is not None:
            screen(placed)
        models = open_models(placed, opened)
        engine = compose_engine(placed, models, opened, measure_when_idle, learning)
        opened.pop_all()
    return engine


def _with_arguments(
    arguments: Callable[_Arguments, LoadArguments],
) -> Callable[[Callable[[LoadArguments], Engine]], Callable[_Arguments, Engine]]:
    """Gives a function the arguments that the class takes, for type checkers, for `help` and in
    its docstring."""

    def decorate(opening: Callable[[LoadArguments], Engine]) -> Callable[_Arguments, Engine]:
        signature = _signature()
        options = declared_options(AskedOptions)
        said = [f"model: {MODEL_HELP}"]
        said += [f"{name}: {each.option.help}" for name, each in options.items()]

        @wraps(opening)
        def load(*given: _Arguments.args, **named: _Arguments.kwargs) -> Engine:
            for name in named:
                if name not in signature.parameters:
                    raise _unknown(name)
            return opening(arguments(*given, **named))

        load.__doc__ = "\n    ".join([opening.__doc__ or "", *said])
        load.__signature__ = signature  # type: ignore[attr-defined]
        return load

    return decorate


def _unknown(name: str) -> UsageError:
    """Returns the refusal of an argument that `load` does not have, with the nearest one: users
    write options as the command line has them."""
    options = declared_options(AskedOptions)
    spoken = {each.flag.removeprefix("--").replace("-", "_"): each for each in options.values()}
    spoken |= options
    near = get_close_matches(name, spoken, n=1, cutoff=_ALIKE)
    remedy = "help(edge_spec.load) lists its options."
    if near:
        meant = spoken[near[0]]
        remedy = f"Did you mean {meant.name}, which is {meant.flag} on the command line?"
    return UsageError(f"load has no option {name!r}", remedy=remedy)


def _signature() -> inspect.Signature:
    """Returns that of `load`, with types instead of what the command line needs beside them."""
    types = {name: each.type for name, each in declared_options(AskedOptions).items()}
    given = inspect.signature(LoadArguments).parameters.values()
    return inspect.Signature(
        [each.replace(annotation=types.get(each.name, each.annotation)) for each in given],
        return_annotation=Engine,
    )


@_with_arguments(LoadArguments)
def load(asked: LoadArguments) -> Engine:
    """Opens a model for `chat` and `generate`; the first use of one converts it into the cache.

    progress: is called with what is being done and the share that is done; all other options are
    those of the command line, which docs/cli.md explains. Without a plan, the one that the cache
    holds for this model decides what is left to "auto". A model that has no profile is measured
    while it is idle. Raises an EdgeSpecError that names what is missing or wrong.
    """
    progress = asked.progress or (lambda what, fraction: None)
    return load_asked(asked.model, asked, progress, measure_when_idle=True)


load_async = awaited(load)
load_async.__name__ = load_async.__qualname__ = "load_async"
