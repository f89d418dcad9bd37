"""`edge_spec.load`: from a model's name and a user's options to an engine.

`plans_for` lists plans, best first; `open_engine` opens the first that works. The package is not
called `load`, because importing `edge_spec.load` would replace the function of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec

from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import ANSWER_NAMES, how_to_give
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, UsageError
from edge_spec.loader.open import (
    PreparedEngine,
    StartLearning,
    TargetRefusedError,
    begin_opening,
    check_capabilities,
    compose_engine,
    open_models,
    prepare_engine,
)
from edge_spec.models.asked_options import (
    MODEL_HELP,
    AskedOptions,
    LoadArguments,
    declared_options,
    meant,
    require_type,
)
from edge_spec.models.model_plan import Refusal
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.engine_plan import (
    EnginePlan,
    choose_plan,
    plan_engine,
    plans_for,
    tell_untrained,
)

__all__ = [
    "LoadOptions",
    "StartLearning",
    "check_capabilities",
    "load",
    "load_asked",
    "load_engine",
    "open_engine",
]


_Arguments = ParamSpec("_Arguments")
_PROGRESS_HELP = "It is called with what is being done and the share that is done."
Screen = Callable[[PreparedEngine], None]  # refuses requests before models are opened


def load_asked(
    model: str,
    asked: AskedOptions,
    progress: Progress,
    *,
    keeps_answers: bool = True,
    screen: Screen | None = None,
    needs_chat: bool = False,
    learning: StartLearning | None = None,
) -> Engine:
    """Open an engine; a drafter trained here is used unless others were requested. keeps_answers:
    for later runs. Raises as `load_engine` does, what `screen` and `learning` raise, and
    UnsupportedModelError without a required chat template."""
    source = Source(model, progress)
    ways = partial(plans_for, source, asked, keeps_answers=keeps_answers)
    plans = ways(uses_trained=learning is None)
    try:
        return open_engine(plans, learning, screen, needs_chat)
    except EdgeSpecError as error:
        if not plans[0].is_own:
            raise
        engine = open_engine(ways(uses_trained=False), learning, screen, needs_chat)
        tell_untrained(source, error)  # only now: the target is not at fault
        return engine


def load_engine(model: str, options: LoadOptions, progress: Progress) -> Engine:
    """Open an engine. Raises an EdgeSpecError that names what is missing or wrong."""
    return open_engine(plan_engine(Source(model, progress), options))


def open_engine(
    plans: Sequence[EnginePlan],
    learning: StartLearning | None = None,
    screen: Screen | None = None,
    needs_chat: bool = False,
) -> Engine:
    """Open the first plan that works; log runtimes that failed. Raises as `load_asked` does."""
    refusals: tuple[Refusal, ...] = ()
    while True:
        plan, left = choose_plan(plans, refusals)
        try:
            with ExitStack() as opened:  # closes opened models if the rest fails
                prepared = _prepared(plan, left, needs_chat, makes_room=screen is not None)
                take = begin_opening(prepared, opened)
                if needs_chat:
                    prepared.target.text.template()
                if screen is not None:
                    screen(prepared)
                models = open_models(prepared, take, opened)
                engine = compose_engine(models, opened, learning)
                opened.pop_all()
                return engine
        except TargetRefusedError as refused:
            plans, error = _others(left, plan, refused.error), refused.error
            if not plans:
                raise error from None
            refusals = (*plan.target.refusals, Refusal(plan.target.name, error))


def _prepared(
    plan: EnginePlan, left: Sequence[EnginePlan], needs_chat: bool, makes_room: bool
) -> PreparedEngine:
    """Raises TargetRefusedError if memory is short or a device chosen by measurements is gone:
    another plan may work."""
    try:
        if left and left[0].target.how.providers != plan.target.how.providers:
            plan.target.require_devices()
    except EdgeSpecError as error:
        raise TargetRefusedError(error) from error
    try:
        return prepare_engine(plan, needs_chat, makes_room)
    except DeviceMemoryError as error:
        raise TargetRefusedError(error) from error


def _others(
    left: Sequence[EnginePlan], failed: EnginePlan, error: EdgeSpecError
) -> list[EnginePlan]:
    """Return the plans after a failed target. Short memory does not justify a conversion for
    another runtime."""
    tried = failed.target.name, failed.target.how
    others = [each for each in left if (each.target.name, each.target.how) != tried]
    if isinstance(error, DeviceMemoryError):
        others = [each for each in others if each.target.is_there]
    return others


def _with_arguments(
    arguments: Callable[_Arguments, LoadArguments],
) -> Callable[[Callable[[LoadArguments], Engine]], Callable[_Arguments, Engine]]:
    """Give a function LoadArguments' arguments, for type checkers, `help` and its docstring."""

    def decorate(opening: Callable[[LoadArguments], Engine]) -> Callable[_Arguments, Engine]:
        options = declared_options(AskedOptions)
        # Fields' types, without the command line's additions.
        types = {name: each.type for name, each in options.items()}
        known = inspect.signature(LoadArguments).parameters.values()
        signature = inspect.Signature(
            [each.replace(annotation=types.get(each.name, each.annotation)) for each in known],
            return_annotation=Engine,
        )
        said = [f"model: {MODEL_HELP}"]
        said += [f"{name}: {each.help}" for name, each in options.items()]

        @wraps(opening)
        def load(*given: _Arguments.args, **named: _Arguments.kwargs) -> Engine:
            for name in named:
                if name not in signature.parameters:
                    raise _unknown(name)
            asked = arguments(*given, **named)
            require_type("model", asked.model, str | Path, MODEL_HELP)
            for name, each in options.items():
                require_type(name, getattr(asked, name), each.type, each.help)
            require_type("progress", asked.progress, Callable[..., None] | None, _PROGRESS_HELP)
            return opening(asked)

        load.__doc__ = "\n    ".join([opening.__doc__ or "", *said])
        load.__signature__ = signature  # type: ignore[attr-defined]
        return load

    return decorate


def _unknown(name: str) -> UsageError:
    """Refuse an unknown argument with a suggestion; users write options as on the command line."""
    options = declared_options(AskedOptions)
    flags = {each.flag.removeprefix("--"): known for known, each in options.items()}
    names = [*options, "model", "progress", *ANSWER_NAMES]
    found = meant(name, names, flags)
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
    """Open a model for `chat` and `generate`; its first use converts it into the cache.

    A model runs where `edge-spec plan` measured it to be fastest, unless options say otherwise.
    Options are those of the command line, which docs/cli.md explains, and `progress`, which is
    called with what is being done and the fraction that is done. Raises an EdgeSpecError that names
    what is missing or wrong.
    """
    progress = asked.progress or (lambda what, fraction: None)
    return load_asked(str(asked.model), asked, progress)


@dataclass(frozen=True)
class ModelOnDemand:
    """A model that is opened on request, and may be closed and reopened.

    name: in lists and answers; aliases: also accepted in requests. open: takes `report` (None: show
    progress to whoever started the program) and `screen`, which receives the models before their
    weights are read; raises an EdgeSpecError, and what these raise.
    """

    name: str
    open: Callable[..., AbstractContextManager[Engine]]
    aliases: tuple[str, ...] = ()


def options_of_others(asked: AskedOptions) -> AskedOptions:
    """Return the options of further models of a command: a named draft and early exit's layers
    belong to the first."""
    asked = replace(asked, exit_layer=None)
    if not set(asked.named_drafts or ()) - {"auto", "none"}:
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
