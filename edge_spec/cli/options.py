"""Options shared by several commands, how typer reads them, and opening their engine.

ServerOptions also decides which hosts and origins may send requests. Import nothing heavy here:
every `--help` loads this module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from ipaddress import ip_address
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from edge_spec.cli.output import ProgressBar
from edge_spec.core.sampling_params import SamplingParams
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import (
    MODEL_HELP,
    Option,
    declared_options,
    option,
    require_type,
)
from edge_spec.models.asked_options import AskedOptions as AskedOptions
from edge_spec.text.parts.answer_form import (
    AnswerForm,
    Reasoning,
    answer_tokens,
    read_reasoning,
)

if TYPE_CHECKING:
    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@]+)(:[0-9]{0,5})?")  # a Host header
# An extension's or editor view's host differs with each installation, so it may be *.
_ORIGIN = re.compile(
    r"(?!https?://\*)[a-z][a-z0-9+.-]*://(\*|[^/?#@*\s]*?)(?P<any_port>:\*)?", re.IGNORECASE
)
_KEY = re.compile(r"[ -~]+")
_LEAST_S = 1e-3
_server = partial(option, panel="Server")
_several = partial(_server, (), read_as=list[str] | None)
_limit = partial(option, panel="Limits of the server")
_SAMPLING = "Sampling"
_sampling = partial(option, None, panel=_SAMPLING)
_OF_NO_DRAW = ("max_tokens", "reasoning")  # not part of SamplingParams


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen and how long an answer may be. None: greedy for `generate`; in
    conversations the sampling that the model's makers recommend, else edge-spec's own. Raises
    UsageError for a value out of range."""

    max_tokens: int | None = _sampling(
        "Most tokens of an answer.  [default: 512, plus 3584 for a thought]"
    )
    temperature: float | None = _sampling(
        "Randomness of the choice; 0 takes the likeliest token.  [default: 0 in generate and for "
        "requests; in conversations, as for the next four, what the model's makers recommend]"
    )
    top_k: int | None = _sampling("Draw among this many of the likeliest tokens; 0: all.")
    top_p: float | None = _sampling(
        "Draw among the likeliest tokens that reach this probability together; 1: all."
    )
    min_p: float | None = _sampling(
        "Leave out tokens below this share of the likeliest one's probability; 0: none."
    )
    repetition_penalty: float | None = _sampling(
        "Above 1, tokens that were written before become less likely; 1: no change."
    )
    seed: int | None = _sampling("Seed of the random draws.  [default: another one in each run]")
    reasoning: str = option(
        "auto",
        "Whether a model that can think does: auto, off, or N tokens at most.",
        _SAMPLING,
        metavar="auto|off|N",
    )

    def __post_init__(self) -> None:
        _require_in_range(self)
        if self.max_tokens is not None and self.max_tokens < 1:
            told = f"max_tokens is {self.max_tokens}"
            raise UsageError(told, remedy="It has to be 1 or more.")
        _ = self.params, self.thoughts

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.asked)

    @property
    def thoughts(self) -> Reasoning:
        return read_reasoning(self.reasoning)

    def limit(self, form: AnswerForm | None) -> int:
        """Return the most tokens of an answer of this form."""
        return answer_tokens(form) if self.max_tokens is None else self.max_tokens

    @property
    def asked(self) -> dict[str, Any]:
        """The given values, by their names in SamplingParams."""
        given = vars(self).items()
        return {name: each for name, each in given if each is not None and name not in _OF_NO_DRAW}


def _require_in_range(options: Any) -> None:
    """Raises UsageError for a value of another type or out of range."""
    group: type = type(options)
    for name, known in declared_options(group).items():
        value, least, most = getattr(options, name), known.least, known.most
        require_type(name, value, known.type, known.help)
        if value is None or least is None:
            continue
        if not least <= value <= (inf if most is None else most):  # NaN is in no range
            to = "or more" if most is None else f"to {most}"
            raise UsageError(f"{name} is {value}", remedy=f"It has to be {least} {to}.")


def origin_pattern(origin: str) -> str:
    """Return a regular expression for the Origin headers that `origin` allows. Raises
    UsageError."""
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        raise UsageError(
            f"{origin!r} is no origin",
            remedy="Write it as https://example.com, http://localhost:*, app://obsidian.md or "
            "moz-extension://*.",
        )
    named = origin.removesuffix(":*") if found["any_port"] else origin
    pattern = re.escape(named).replace(r"\*", "[^/:?#]+")
    return f"(?i:{pattern}{'(:[0-9]+)?' if found['any_port'] else ''})"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the server. Raises UsageError for a value out of range, or for an address that
    other machines reach without a key.

    sampling: defaults for requests that do not set them.
    """

    host: str = _server("127.0.0.1", "The address to listen on; others than loopback need a key.")
    port: int = _server(8080, "The port; 0 takes a free one.", least=0, most=65535)
    api_key: str | None = _server(
        None, "The key that clients have to send.", envvar="EDGE_SPEC_API_KEY", repr=False
    )
    cors_origins: Sequence[str] = _several(
        "A site, app or extension whose pages may ask; may be repeated.",
        flag="--cors-origin",
    )
    allowed_hosts: Sequence[str] = _several(
        "Another name of this machine, as a container or a tunnel uses it; may be repeated.",
        flag="--allow-host",
    )
    max_models: int | None = _limit(
        None, "Models open at once.  [default: as many as memory holds]", least=1
    )
    load_timeout_s: float = _limit(
        300.0, "Seconds that a request may wait for its model to be opened.", least=_LEAST_S
    )
    parallel: int = _server(4, "Answers of a model at once; each has a cache.", least=1)
    queue: int = _limit(64, "Requests that may wait.", least=0)
    queue_timeout_s: float = _limit(60.0, "Seconds that a request may wait.", least=_LEAST_S)
    request_timeout_s: float = _limit(
        600.0, "Seconds that an answer may take from its first token on.", least=_LEAST_S
    )
    client_timeout_s: float = _limit(
        30.0, "Seconds that a client may take to send the body of a request.", least=_LEAST_S
    )
    grace_s: float = _limit(
        30.0, "Seconds that running answers get to end after Ctrl-C.", least=0, most=86_400
    )
    max_body_bytes: int = _limit(2 << 20, "Bytes of the largest request.", least=1)
    sampling: SamplingOptions = SamplingOptions()

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise UsageError(  # without showing the key
                "the API key (--api-key) is empty or not ASCII", remedy="Set another one."
            )
        _require_in_range(self)
        require_type("sampling", self.sampling, SamplingOptions)
        if not self.is_loopback and not key:
            raise UsageError(
                f"other machines reach {self.host}",
                remedy="Set --api-key or EDGE_SPEC_API_KEY, or listen on 127.0.0.1.",
            )
        for origin in self.cors_origins:
            origin_pattern(origin)

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or (_is_ip(self.host) and ip_address(self.host).is_loopback)

    def allows_host(self, header: str) -> bool:
        """Return whether a request from this machine may use this Host header.

        Another site's name may resolve to this machine (DNS rebinding). IP addresses are safe, as
        no name resolves to another; localhost is safe, as no name server answers for it.
        """
        found = _HOST.fullmatch(header.strip().lower())
        name = found[1].strip("[]").removesuffix(".") if found else ""
        allowed = {each.lower().removesuffix(".") for each in self.allowed_hosts}
        return name == "localhost" or name.endswith(".localhost") or name in allowed or _is_ip(name)


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
NamedModel = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
switch = partial(typer.Option, metavar="")
Learn = Annotated[
    bool,
    switch(
        "--learn",
        help="Keep answers on this machine, and train a head on them while idle; see drafters.md.",
        rich_help_panel="Model and drafting",
    ),
]
Explain = Annotated[bool, switch("--explain", help="First print what runs, what drafts, and why.")]
Json = Annotated[bool, switch("--json", help="Print one JSON document on stdout.")]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Flatten a command's dataclass parameters into options, and pass it instances of them."""
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

    # The signature for typer; `wraps` copied the command's own.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(declared: Option) -> inspect.Parameter:
    is_switch = bool in (declared.read_as, *get_args(declared.read_as))
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declared.command_line_default,
        annotation=Annotated[
            declared.read_as,
            typer.Option(
                # Without an explicit flag typer derives one, with a "--no-..." twin for a bool.
                *([declared.flag] if declared.own_flag or declared.is_in_seconds else []),
                help=declared.help,
                rich_help_panel=declared.panel,
                metavar=declared.value_name or ("" if is_switch else "TEXT"),
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

    report: replaces the progress bar on stderr. learns: train on answers while idle. explain:
    print what runs, who drafts and why. more: passed to `load_asked`, whose errors it raises.
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
            print(line, file=sys.stderr)  # keep stdout for the answer
    return engine
