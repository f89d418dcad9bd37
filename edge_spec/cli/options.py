"""Options that several commands share, as typer reads them, and the engine that they open.

No heavy import: every `--help` passes through here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from edge_spec.cli.output import ProgressBar
from edge_spec.core.sampling_params import SamplingParams
from edge_spec.models.asked_options import MODEL_HELP, Option, declared_options, option
from edge_spec.models.asked_options import AskedOptions as AskedOptions
from edge_spec.text.parts.answer_form import read_reasoning

if TYPE_CHECKING:
    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine

_SAMPLING = "Sampling"
_sampling = partial(option, None, panel=_SAMPLING)
_OF_NO_DRAW = ("max_tokens", "reasoning")  # those that say nothing of how a token is chosen


@dataclass(frozen=True)
class SamplingOptions:
    """Says how the next token is chosen, and how long an answer may be. None: greedy for a single
    answer, for conversations as the model's makers state, else as edge-spec does."""

    max_tokens: int | None = _sampling(
        "Most tokens of an answer.  [default: 512, and 3584 for a thought]"
    )
    temperature: float | None = _sampling(
        "How freely tokens are drawn; 0 takes the likeliest one.  [default: 0 in generate, else "
        "this and the next four as the model's makers state]"
    )
    top_k: int | None = _sampling("Draw among this many likeliest tokens; 0 keeps all.")
    top_p: float | None = _sampling(
        "Draw among the likeliest tokens that have this share together; 1 keeps all."
    )
    min_p: float | None = _sampling(
        "Leave out tokens below this share of the likeliest one's; 0 keeps all."
    )
    repetition_penalty: float | None = _sampling(
        "Above 1, what was written becomes less likely; 1 leaves it."
    )
    seed: int | None = _sampling("Begins the random draws; without it, each run draws otherwise.")
    reasoning: str = option(
        "auto",
        "Whether a model that thinks does so: auto, off, or for N tokens at most.",
        _SAMPLING,
        metavar="auto|off|N",
    )

    def params(self) -> SamplingParams:
        """Raises UsageError for a value out of its range."""
        return SamplingParams(**self.asked)

    @property
    def asked(self) -> dict[str, Any]:
        """Returns what was given, by the names of SamplingParams."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value for name, value in given.items() if name not in _OF_NO_DRAW}

    def of_requests(self) -> dict[str, Any]:
        """What holds for requests that do not say, by the names of ServerOptions. Raises
        UsageError."""
        limit = self.max_tokens
        return {
            **({} if limit is None else {"max_tokens": limit, "thought_tokens": 0}),
            "sampling": self.params(),
            "reasoning": read_reasoning(self.reasoning),
            "asked_sampling": self.asked,
        }


Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
NamedModel = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn",
        help="Keep answers on this machine, and train a head on them while idle: drafters.md.",
        rich_help_panel="Model and drafting",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Say what runs, who drafts and why, in three lines.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the fields of each of its parameters that is a dataclass of declared options
    as options, and calls it with an instance of the class."""
    hints = get_type_hints(command, include_extras=True)
    groups = {
        name: (hint, declared_options(hint))
        for name, hint in hints.items()
        if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [_parameter(declared) for declared in groups[name][1].values()]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, (group, options) in groups.items():
            read = {each: options[each].from_command_line(values.pop(each)) for each in options}
            values[name] = group(**read)
        command(**values)

    # What typer reads; `wraps` copied the command's own.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(declared: Option) -> inspect.Parameter:
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declared.command_line_default,
        annotation=Annotated[
            declared.read_as,
            typer.Option(
                # Without a flag typer takes the name, and adds "--no-..." to a switch.
                *([declared.flag] if declared.own_flag or declared.is_in_seconds else []),
                help=declared.help,
                rich_help_panel=declared.panel,
                metavar=declared.metavar,
                envvar=declared.envvar,
                min=declared.least,
                max=declared.most,
            ),
        ],
    )


def open_engine(
    model: str,
    options: AskedOptions,
    *,
    report: Progress | None = None,
    learns: bool = False,
    explain: bool = False,
    **more: Any,
) -> Engine:
    """Open a model for a command.

    report: instead of a bar on stderr. learns: from answers, while idle. explain: prints what runs,
    who drafts and why. more: of `load_asked`. Raises as that does.
    """
    from edge_spec.loader import load_asked

    learning = None
    if learns:
        from edge_spec.distill.idle_learning import require_learnable, start_learning

        require_learnable(options)
        learning = start_learning
    with ProgressBar() as bar:
        engine = load_asked(model, options, report or bar, learning=learning, **more)
    if explain:
        for line in engine.plan:
            print(line, file=sys.stderr)  # stdout belongs to the answer
    return engine
