"""`edge-spec serve [MODEL]`: OpenAI's API and a web page, and `desktop`: the page in a window."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import print_json
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import Option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_spec.loader import ModelOnDemand


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
    from edge_spec.cli.opening import open_engine
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
    from edge_spec.cli.opening import open_engine
    from edge_spec.loader import ModelOnDemand, options_of_others
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
    from edge_spec.cli.opening import open_engine
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
