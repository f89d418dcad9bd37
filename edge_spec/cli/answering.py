"""`edge-spec generate`, `chat`, `serve` and `desktop`: what answers."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from edge_spec.cli import options
from edge_spec.cli.options import open_engine
from edge_spec.cli.output import ProgressBar, print_json
from edge_spec.errors import UsageError
from edge_spec.models.option import Option
from edge_spec.text.parts.part import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine
    from edge_spec.engine.generation import Generation
    from edge_spec.engine.results import Chunk, GenerationResult
    from edge_spec.loader.on_demand import ModelOnDemand
    from edge_spec.loader.place import PlacedModels
    from edge_spec.text.grammar import Grammar
    from edge_spec.text.parts.answer_form import AnswerForm
    from edge_spec.text.thoughts import Reasoning


_MAX_ROWS = 10  # of a thought that is being written
_ROWS_BELOW = 2
_EVERY_S = 0.2  # at most: drawing takes the interpreter from the model


class AnswerWriter:
    """A pipe gets the text alone."""

    def __init__(
        self, result: GenerationResult, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """result: of the answer, which grows with each chunk."""
        self._result = result
        self._clock = clock
        self._not_before = 0.0  # a thought is drawn again
        self._live: Any = None  # what shows the thought that is being written
        self._is_thinking = False

    def write(self, chunk: Chunk) -> None:
        if chunk.kind is PartKind.REASONING:
            self._is_thinking = True
            if sys.stdout.isatty() and self._clock() >= self._not_before:
                self._show_thought()
                self._not_before = self._clock() + _EVERY_S
            return
        self._fold()
        if chunk.kind is PartKind.TEXT:
            print(chunk.text, end="", flush=True)

    def finish(self) -> None:
        """Ends the line, also of an answer that was interrupted."""
        self._fold()
        print()

    def _show_thought(self) -> None:
        """Draws its last lines over those of before."""
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            console = Console(highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        console = self._live.console
        rows = max(min(console.height - _ROWS_BELOW, _MAX_ROWS), 1)
        # No more than these rows could show.
        end = self._result.reasoning[-rows * console.width :]
        text = Text("".join(c if c.isprintable() or c == "\n" else " " for c in end))
        lines = text.wrap(console, console.width)[-rows:]
        self._live.update(Text("\n", "dim").join(lines), refresh=True)

    def _fold(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        live, self._live = self._live, None
        if live is not None:
            from edge_spec.engine.thought_line import thought_line

            live.stop()
            if self._result.reasoning.strip():
                live.console.print(thought_line(self._result), style="dim")


_log = logging.getLogger(__name__)


@options.with_groups
def generate(
    model: Annotated[
        str | None, typer.Argument(help=f"{options.MODEL_HELP}  [default: smollm2]")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A single argument is the prompt; - reads it from stdin."),
    ] = None,
    raw: Annotated[
        bool, typer.Option(help="Continue the text instead of answering it as a chat message.")
    ] = False,
    suffix: Annotated[
        str | None,
        typer.Option(help="Write what stands between the prompt and this text, as in code."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON Schema that the answer has to fit.")
    ] = None,
    *,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    from edge_spec.text.parts.answer_length import TEXT_TOKENS, answer_tokens
    from edge_spec.text.thoughts import read_reasoning

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    params = sampling.params()
    grammar = None if schema is None else _grammar(schema)
    text = sys.stdin.read() if prompt == "-" else prompt
    limit = sampling.max_tokens
    between = None
    if suffix is not None:
        between = _Between(suffix, TEXT_TOKENS if limit is None else limit)
    asked = _Asked(text, raw, between, read_reasoning(sampling.reasoning))
    with open_engine(model, loading, screen=asked.encode) as engine:
        generation = engine.generate(
            asked.tokens,
            max_tokens=answer_tokens(asked.form) if limit is None else limit,
            stop=stop or (),
            sampling=params,
            grammar=grammar,
            form=asked.form,
            stream=True,
        )
        _print(generation, json)


class _Between(NamedTuple):
    """What the answer stands before, and how long it may be."""

    suffix: str
    max_tokens: int


class _Asked:
    """The prompt: its tokens are known when the model's header is, before the weights are read.

    form: which parts the answer may have.
    """

    def __init__(
        self, text: str, raw: bool, between: _Between | None, reasoning: Reasoning
    ) -> None:
        self._text = text
        self._between = between
        self._raw = raw
        self._reasoning = reasoning
        self.tokens: Sequence[int] = ()
        self.form: AnswerForm | None = None

    def encode(self, placed: PlacedModels) -> None:
        """Raises ContextFullError, UnsupportedModelError for a chat template that fails, and for a
        model that was not trained to fill in."""
        from edge_spec.engine.request import require_room
        from edge_spec.text.infill import room_beside

        text = placed.target.text
        if self._between is not None:
            suffix, max_tokens = self._between
            room = room_beside(placed.context_length, max_tokens)
            self.tokens = text.infill.prompt(self._text, suffix, room=room)
            return
        is_source = placed.target.config.encoder is not None
        if not self._raw and text.chat_template is None and not is_source:
            _log.warning(
                "%s has no chat template: the prompt is continued as it is, as with --raw",
                placed.target.name,
            )
        if self._raw or text.chat_template is None:
            self.tokens = text.tokenizer.encode(self._text)
        else:
            self.tokens = text.chat_prompt(self._text, reasoning=self._reasoning)
            self.form = text.answer_form(self.tokens, reasoning=self._reasoning)
        require_room(self.tokens, placed.context_length)


def _grammar(path: Path) -> Grammar:
    """Raises UsageError for a file that is no JSON object."""
    from edge_spec.text.grammar import Grammar

    try:
        schema = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the schema {path}: {error}", remedy="Give a file with a JSON Schema."
        ) from None
    if not isinstance(schema, dict):
        raise UsageError(
            f"the schema {path} is no JSON object", remedy='For example {"type": "object"}.'
        )
    return Grammar.json_schema(schema)


def _print(generation: Generation, as_json: bool) -> None:
    """Raises KeyboardInterrupt after what there is of an interrupted answer, EdgeSpecError after
    what there is of one that the model failed in."""
    from edge_spec.engine.thought_line import cut_thought

    writer = AnswerWriter(generation.result)
    try:
        with generation.cancelled_by_interrupt():
            with ProgressBar() as generation.progress:
                first = next(generation, None)
            for chunk in generation if first is None else chain([first], generation):
                if not as_json:
                    writer.write(chunk)
    finally:
        if as_json and generation.result.finish_reason is not None:
            print_json(generation.result.to_dict())
        elif not as_json:
            writer.finish()
    if (note := cut_thought(generation.result)) is not None:
        _log.warning("%s", note)
    if generation.result.finish_reason == "cancelled":
        raise KeyboardInterrupt


@options.with_groups
def chat(
    model: options.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    learn: options.Learn = False,
    *,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer."""
    from edge_spec.core import entry_points
    from edge_spec.text.thoughts import read_reasoning

    def opener(model: str, *, exact: bool, report: Progress | None) -> Engine:
        return open_engine(
            model,
            replace(loading, exact=exact),
            measure_when_idle=True,
            report=report,
            needs_chat=True,
            learns=learn,
        )

    sampling.params()  # refused now rather than when the model is open
    answering = {
        "max_tokens": sampling.max_tokens,
        "reasoning": read_reasoning(sampling.reasoning),
    }
    entry_points.load_app("chat")(
        opener, model, loading.exact, answering, system, json, asked_sampling=sampling.asked
    )


_SERVER = "Server"
_PARALLEL = 2  # answers at once: one that is read, and one that is asked for meanwhile


@dataclass(frozen=True)
class ServerSettings:
    """Holds what the person who starts a server decides, by the names of `ServerOptions`."""

    host: Annotated[str, Option("The address; others than loopback need a key.", _SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option("The port; 0 takes a free one.", _SERVER)] = 8080
    api_key: Annotated[
        str | None, Option("What clients have to know.", _SERVER, envvar="EDGE_SPEC_API_KEY")
    ] = field(default=None, repr=False)
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "A site, app or extension whose pages may ask; may be repeated.",
            _SERVER,
            flag="--cors-origin",
            read_as=list[str] | None,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Another name of this machine, by which a container or a tunnel asks; may be repeated.",
            _SERVER,
            flag="--allow-host",
            read_as=list[str] | None,
        ),
    ] = ()
    max_models: Annotated[
        int | None, Option("Models open at once.  [default: as many as memory holds]", _SERVER)
    ] = None
    load_timeout_s: Annotated[
        float, Option("Seconds that a request may wait for its model to be opened.", _SERVER)
    ] = 300.0
    parallel: Annotated[
        int, Option("Answers of a model at once, each with a cache of its own.", _SERVER)
    ] = 4
    queue: Annotated[int, Option("Requests that may wait.", _SERVER)] = 64
    queue_timeout_s: Annotated[float, Option("Seconds that one may wait.", _SERVER)] = 60.0
    request_timeout_s: Annotated[
        float, Option("Seconds that an answer may take from its first token on.", _SERVER)
    ] = 600.0
    client_timeout_s: Annotated[
        float, Option("Seconds that a client may take to send a request, or not to read.", _SERVER)
    ] = 30.0
    grace_s: Annotated[float, Option("Seconds that answers have to end on a signal.", _SERVER)] = (
        30.0
    )
    max_body_bytes: Annotated[int, Option("Largest request.", _SERVER)] = 2 << 20


@dataclass(frozen=True)
class ServeOptions:
    """Holds what is decided before there is a server."""

    alias: Annotated[
        tuple[str, ...],
        Option(
            "Another name for a model, its first one in lists and answers; NAME alone where there "
            "is one model; may be repeated.",
            _SERVER,
            metavar="NAME=MODEL",
            read_as=list[str] | None,
        ),
    ] = ()
    stdio: Annotated[
        bool,
        Option(
            "Speak JSON-RPC on standard input and output instead: no other option of the server or "
            "of sampling applies.",
            _SERVER,
            flag="--stdio",
        ),
    ] = False


@options.with_groups
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{options.MODEL_HELP} Of several, the others are opened when they are asked for.",
            show_default="smollm2",
        ),
    ] = None,
    *,
    settings: ServerSettings,
    serving: ServeOptions,
    learn: options.Learn = False,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Serve OpenAI's API and a web page on this machine. Ctrl-C ends it.

    Several models share one address; requests say which one is meant, and that one is opened. Then
    --plan, --exit-layer and a --draft that is named are of the first model, all other options of
    every one.

    Sampling options, --max-tokens and --reasoning hold for requests that do not say; without them,
    a request is answered with the likeliest tokens, and the page as the model's makers state.
    --json prints one line, {"url", "port", "model"}, when requests are accepted; "models" are all
    of several.
    """
    from edge_spec.core import entry_points
    from edge_spec.text.thoughts import read_reasoning

    named = model or ["smollm2"]
    of_requests = sampling.params()
    reasoning = read_reasoning(sampling.reasoning)
    if serving.stdio:
        if len(named) > 1:
            raise UsageError("--stdio serves one model", remedy="Start a process for each model.")
        open_model = partial(open_engine, named[0], loading, measure_when_idle=True, learns=learn)
        entry_points.load_app("sidecar")(open_model)
        return
    models = models_on_demand(named, serving.alias, loading, learns=learn)
    entry_points.load_app("serve")(
        models,
        partial(_announce, names=[each.name for each in models], as_json=json),
        **vars(settings),
        **sampling.length,
        sampling=of_requests,
        reasoning=reasoning,
        asked_sampling=sampling.asked,
    )


def models_on_demand(
    models: Sequence[str],
    aliases: Sequence[str],
    loading: options.AskedOptions,
    *,
    learns: bool = False,
) -> list[ModelOnDemand]:
    """Raises as `served_names` does, and UsageError where several are to learn."""
    from edge_spec.loader.on_demand import ModelOnDemand, options_of_others
    from edge_spec.models.source import served_names

    is_alone = len(models) == 1  # else one would be measured while another answers
    if learns and not is_alone:
        raise UsageError(
            "--learn is for one model, since it learns while nobody is answered",
            remedy="Start a server for each model, or leave --learn out.",
        )
    served: list[ModelOnDemand] = []
    for model, names in zip(models, served_names(models, aliases), strict=True):
        asked = options_of_others(loading) if served else loading
        opening = partial(open_engine, model, asked, measure_when_idle=is_alone, learns=learns)
        plan = partial(plan_document, model, asked)
        served.append(ModelOnDemand(names.name, opening, names.aliases, plan))
    return served


def _announce(model: str, url: str, port: int, names: Sequence[str], as_json: bool) -> None:
    if as_json:
        several = {"models": names} if len(names) > 1 else {}
        print_json({"url": url, "port": port, "model": model, **several})
    else:
        print(f"Serving {', '.join(names)} on {url}; Ctrl-C ends it.", file=sys.stderr, flush=True)


def plan_document(model: str, loading: options.AskedOptions) -> Mapping[str, Any] | None:
    """The plan that was asked for, else what `edge-spec plan` keeps of this model, if anything."""
    import json
    from pathlib import Path

    from edge_spec.loader.place import asked_drafts
    from edge_spec.models.source import Source
    from edge_spec.placement.plan import cached_plan, plan_json, plan_path, read_plan

    def quiet(what: str, fraction: float) -> None:
        pass

    if loading.plan is not None:
        plan = read_plan(Path(loading.plan))
    else:
        target = Source(model, quiet)
        drafts = asked_drafts(target, loading)
        kept = cached_plan(plan_path(target, Source(drafts[0], quiet) if drafts else None))
        if kept is None:
            return None
        plan = kept
    document: Mapping[str, Any] = json.loads(plan_json(plan))
    return document


@options.with_groups
def desktop(
    model: options.Model = "smollm2",
    learn: options.Learn = False,
    *,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
) -> None:
    """Talk to a model in a window, whose closing ends everything. Sampling options,
    --max-tokens and --reasoning hold for what the page does not set."""
    from edge_spec.core import entry_points
    from edge_spec.text.thoughts import read_reasoning

    entry_points.load_app("desktop")(
        partial(open_engine, model, loading, measure_when_idle=True, needs_chat=True, learns=learn),
        _say_where,
        title=model,
        plan=lambda: plan_document(model, loading) or {"candidates": []},
        parallel=_PARALLEL,
        **sampling.length,
        sampling=sampling.params(),
        reasoning=read_reasoning(sampling.reasoning),
        asked_sampling=sampling.asked,
    )


def _say_where(model: str, url: str, port: int) -> None:
    print(f"{model} is in the window, served on {url}.", file=sys.stderr, flush=True)
