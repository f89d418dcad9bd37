"""`edge-spec serve [MODEL]`: OpenAI's API and a web page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_spec.loader.on_demand import ModelOnDemand

_SERVER = "Server"


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SERVER, **settings)


@options.with_groups
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{options.MODEL_HELP} Of several, the others are opened when they are asked for.",
            show_default="smollm2",
        ),
    ] = None,
    host: Annotated[str, _option("The address; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, _option("0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None, _option("What clients have to know.", envvar="EDGE_SPEC_API_KEY")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _option("A site whose pages may ask; may be repeated.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        _option(
            "Another name for a model, its first one in lists and answers; NAME alone where there "
            "is one model; may be repeated.",
            metavar="NAME=MODEL",
        ),
    ] = None,
    max_models: Annotated[
        int | None,
        _option("Models open at once.  [default: as many as memory holds]"),
    ] = None,
    load_timeout: Annotated[
        float, _option("Seconds that a request may wait for its model to be opened.")
    ] = 300.0,
    parallel: Annotated[
        int, _option("Answers of a model at once, each with a cache of its own.")
    ] = 4,
    queue: Annotated[int, _option("Requests that may wait.")] = 64,
    queue_timeout: Annotated[float, _option("Seconds that one may wait.")] = 60.0,
    request_timeout: Annotated[float, _option("Seconds that an answer may take.")] = 600.0,
    client_timeout: Annotated[
        float, _option("Seconds that a client may take to send a request, or not to read.")
    ] = 30.0,
    grace: Annotated[float, _option("Seconds that answers have to end on a signal.")] = 30.0,
    max_body_bytes: Annotated[int, _option("Largest request.")] = 2 << 20,
    stdio: Annotated[
        bool,
        _option(
            "Speak JSON-RPC on standard input and output instead: no other option of the server or "
            "of sampling applies.",
            "--stdio",
        ),
    ] = False,
    learn: options.Learn = False,
    *,
    loading: options.AskedOptions,
    sampling: options.ChatSamplingOptions,
    json: options.Json = False,
) -> None:
    """Serve OpenAI's API and a web page on this machine. Ctrl-C ends it.

    Several models share one address; requests say which one is meant, and that one is opened. Then
    --plan, --exit-layer and a --draft that is named are of the first model, all other options of
    every one.

    Sampling options and --max-tokens hold for requests that do not say; without them, a request is
    answered with the likeliest tokens, and the page as the model's makers state. --json prints one
    line, {"url", "port", "model"}, when requests are accepted; "models" are all of several.
    """
    from edge_spec.cli.opening import open_engine
    from edge_spec.core import entry_points
    from edge_spec.core.sampling import SamplingParams

    named = model or ["smollm2"]
    of_requests = SamplingParams(**sampling.asked)
    if stdio:
        open_model = partial(
            open_engine, _only(named), loading, measure_when_idle=True, learns=learn
        )
        entry_points.load_app("sidecar")(open_model)
        return
    models = models_on_demand(named, alias or [], loading, learns=learn)
    entry_points.load_app("serve")(
        models,
        partial(_announce, names=[each.name for each in models], as_json=json),
        host=host,
        port=port,
        api_key=api_key,
        cors_origins=tuple(cors_origin or ()),
        max_models=max_models,
        load_timeout_s=load_timeout,
        parallel=parallel,
        queue=queue,
        queue_timeout_s=queue_timeout,
        request_timeout_s=request_timeout,
        client_timeout_s=client_timeout,
        grace_s=grace,
        max_body_bytes=max_body_bytes,
        max_tokens=sampling.max_tokens,
        sampling=of_requests,
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
    from edge_spec.loader.on_demand import ModelOnDemand, options_of_others
    from edge_spec.models.served_names import served_names

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


def _only(models: Sequence[str]) -> str:
    """Raises UsageError."""
    if len(models) > 1:
        raise UsageError("--stdio serves one model", remedy="Start a process for each model.")
    return models[0]


def _announce(model: str, url: str, port: int, names: Sequence[str], as_json: bool) -> None:
    import json
    import sys

    if as_json:
        several = {"models": names} if len(names) > 1 else {}
        print(json.dumps({"url": url, "port": port, "model": model, **several}), flush=True)
    else:
        print(f"Serving {', '.join(names)} on {url}; Ctrl-C ends it.", file=sys.stderr, flush=True)


def plan_document(model: str, loading: options.AskedOptions) -> Mapping[str, Any] | None:
    """The plan that was asked for, else what `edge-spec plan` keeps of this model, if anything."""
    import json
    from pathlib import Path

    from edge_spec.loader.resolve import asked_drafts
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
