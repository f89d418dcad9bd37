"""`edge-spec generate`, `chat`, `serve` and `desktop`."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.options import ServerOptions, open_engine
from edge_spec.cli.output import ProgressBar, print_json, printable
from edge_spec.core import entry_points
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import MODEL_HELP, option
from edge_spec.text.parts.part import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine
    from edge_spec.engine.generation import Generation
    from edge_spec.engine.results import Chunk
    from edge_spec.loader import ModelOnDemand
    from edge_spec.text.grammar import Grammar
    from edge_spec.text.parts.answer_form import AnswerForm


class AnswerWriter:
    """Write an answer as it streams. A thought is shown dimmed, in a terminal only."""

    def __init__(self) -> None:
        self._is_thinking = False

    def write(self, chunk: Chunk) -> None:
        if chunk.kind is PartKind.REASONING:
            if sys.stdout.isatty():
                self._is_thinking = True
                typer.secho(printable(chunk.text), dim=True, nl=False)
            return
        self._end_thought()
        if chunk.kind is PartKind.TEXT:
            print(chunk.text, end="", flush=True)

    def finish(self) -> None:
        """End the line, also of an interrupted answer."""
        self._end_thought()
        print()

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            print("\n")


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerateOptions:
    raw: bool = option(
        False, "Continue the text instead of answering it as a chat message.", flag="--raw"
    )
    suffix: str | None = option(
        None, "Write what belongs between the prompt and this text, as in code."
    )
    stop: tuple[str, ...] = option(
        (), "End the answer before this text; may be repeated.", read_as=list[str] | None
    )
    schema: Path | None = option(None, "A file with a JSON Schema that the answer has to fit.")


def generate(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL_HELP}  [default: smollm2]")] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A single argument is the prompt; - reads it from stdin."),
    ] = None,
    *,
    asked: GenerateOptions,
    sampling: options.SamplingOptions,
    loading: options.AskedOptions,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    grammar = None if asked.schema is None else _grammar(asked.schema)
    text = sys.stdin.read() if prompt == "-" else prompt
    with open_engine(model, loading, explain=explain) as engine:
        tokens, form = _encoded(engine, text, asked, sampling)
        generation = engine.generate(
            tokens,
            max_tokens=sampling.limit(form),
            stop=asked.stop,
            sampling=sampling.params,
            grammar=grammar,
            form=form,
            stream=True,
        )
        _print(generation, json)


def _encoded(
    engine: Engine, prompt: str, asked: GenerateOptions, sampling: options.SamplingOptions
) -> tuple[Sequence[int], AnswerForm | None]:
    """Return the prompt's tokens and the answer form, None for a raw prompt.

    Raises UnsupportedModelError if the chat template fails, or for a suffix if the model was not
    trained to fill in.
    """
    text = engine.parts.text
    if asked.suffix is not None:
        most = sampling.limit(None)
        return engine.infill_prompt(prompt, asked.suffix, max_tokens=most), None
    if not asked.raw and text.chat_template is not None:
        tokens = engine.chat_prompt(prompt, reasoning=sampling.thoughts)
        return tokens, text.answer_form(tokens, reasoning=sampling.thoughts)
    if not asked.raw and engine.parts.model.config.encoder is None:
        told = "has no chat template: the prompt is continued as it is, as with --raw"
        _log.warning("%s %s", engine.name, told)
    return engine.encode(prompt), None


def _grammar(path: Path) -> Grammar:
    """Raises UsageError if the file cannot be read or holds no JSON object."""
    from edge_spec.text.grammar import Grammar

    try:
        schema = loads(path.read_text(encoding="utf-8"))
        if not isinstance(schema, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        remedy = 'Give a file with a JSON Schema, such as {"type": "object"}.'
        raise UsageError(f"cannot read the schema {path}: {error}", remedy=remedy) from None
    return Grammar.json_schema(schema)


def _print(generation: Generation, as_json: bool) -> None:
    """Print the answer. Raises, once what was written is printed, KeyboardInterrupt if it was
    interrupted and EdgeSpecError if the model failed."""
    from edge_spec.engine.results import cut_thought

    writer = AnswerWriter()
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


def chat(
    model: options.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.", metavar="TEXT")] = None,
    *,
    sampling: options.SamplingOptions,
    loading: options.AskedOptions,
    learn: options.Learn = False,
    json: options.Json = False,
) -> None:
    """Talk to a model in the terminal.

    /help lists the commands; Ctrl-C stops an answer.
    """

    def opener(model: str, report: Progress | None) -> Engine:
        return open_engine(model, loading, report=report, needs_chat=True, learns=learn)

    entry_points.load_app("chat")(opener, model, sampling, system, as_json=json)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerOptions):
    """The options of `edge-spec serve`. With `stdio` the server's options are not checked."""

    alias: tuple[str, ...] = option(
        (),
        "Another name for a model, shown in place of its own; NAME alone if there is one model; "
        "may be repeated.",
        "Server",
        metavar="NAME=MODEL",
        read_as=list[str] | None,
    )
    stdio: bool = option(
        False,
        "Speak JSON-RPC on standard input and output instead; options of the server and of "
        "sampling do not apply.",
        "Server",
        flag="--stdio",
    )

    def __post_init__(self) -> None:
        if not self.stdio:
            super().__post_init__()


def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{MODEL_HELP} Of several, all but the first are opened on request.  "
            "[default: smollm2]",
        ),
    ] = None,
    *,
    serving: ServeOptions,
    sampling: options.SamplingOptions,
    loading: options.AskedOptions,
    learn: options.Learn = False,
    explain: options.Explain = False,
    json: options.Json = False,
) -> None:
    """Serve OpenAI's API and a chat page on this machine.

    Ctrl-C ends it. Several models share one address: a request names one, which is then opened.
    --exit-layer and a named --draft apply to the first model, all other options to each.

    Sampling options are the defaults of requests. Without them, requests get the likeliest tokens,
    and the page samples as the model's makers recommend. --json prints one line when requests are
    accepted: {"url", "port", "model"}, and "models" if there are several.
    """
    named = model or ["smollm2"]
    opening = partial(open_engine, learns=learn, explain=explain)
    apart = "Start a process for each model."
    if len(named) > 1 and learn:
        raise UsageError("--learn is for one model", remedy=apart)
    if serving.stdio:
        if len(named) > 1:
            raise UsageError("--stdio serves one model", remedy=apart)
        entry_points.load_app("sidecar")(partial(opening, named[0], loading))
        return
    settings = replace(serving, sampling=sampling)
    models = _models_on_demand(named, serving.alias, loading, opening)
    announce = partial(_announce, names=[each.name for each in models], as_json=json)
    entry_points.load_app("serve")(models, settings, announce)


def _models_on_demand(
    models: Sequence[str],
    aliases: Sequence[str],
    loading: options.AskedOptions,
    opening: Callable[..., Engine],
) -> list[ModelOnDemand]:
    from edge_spec.loader import ModelOnDemand, options_of_others
    from edge_spec.models.source import served_names

    served: list[ModelOnDemand] = []
    for model, (name, *others) in zip(models, served_names(models, aliases), strict=True):
        asked = options_of_others(loading) if served else loading
        served.append(ModelOnDemand(name, partial(opening, model, asked), tuple(others)))
    return served


def _announce(model: str, url: str, port: int, names: Sequence[str], as_json: bool) -> None:
    if as_json:
        several = {"models": names} if len(names) > 1 else {}
        print_json({"url": url, "port": port, "model": model, **several})
    else:
        print(f"Serving {', '.join(names)} on {url}; Ctrl-C ends it.", file=sys.stderr, flush=True)


_PARALLEL = 2  # answers at once: one being read, and one requested meanwhile


def desktop(
    model: options.Model = "smollm2",
    *,
    sampling: options.SamplingOptions,
    loading: options.AskedOptions,
    learn: options.Learn = False,
) -> None:
    """Talk to a model in a window of its own.

    Sampling options are the defaults of what the page does not set.
    """
    entry_points.load_app("desktop")(
        partial(open_engine, model, loading, needs_chat=True, learns=learn),
        lambda name, url, port: print(
            f"{name} is in the window, served on {url}.", file=sys.stderr, flush=True
        ),
        title=model,
        options=ServerOptions(parallel=_PARALLEL, sampling=sampling),
    )
