"""The endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_spec.apps.server.anthropic import (
    MESSAGES,
    add_messages,
    asks_for_its_form,
    model_document,
    models_page,
)
from edge_spec.apps.server.body import refused_body
from edge_spec.apps.server.errors import ApiError, api_error, error_response
from edge_spec.apps.server.guard import Guard
from edge_spec.apps.server.llamacpp import add_llamacpp_paths
from edge_spec.apps.server.metrics import MEDIA_TYPE, Metrics
from edge_spec.apps.server.models import Description, Models, ServedModel
from edge_spec.apps.server.ollama import add_ollama
from edge_spec.apps.server.openai import add_openai
from edge_spec.apps.server.options import ServerOptions, origin_pattern
from edge_spec.apps.server.reply import Running
from edge_spec.apps.server.responses import add_responses
from edge_spec.apps.web import INDEX, load_assets

_GONE = {
    "/completion": "Send the prompt to POST /v1/completions.",
    "/slots": "GET /metrics tells how many slots there are and how many of them answer.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused."},
    "5XX": {"description": "The server fails or is busy."},
}


def build_app(running: Running, options: ServerOptions) -> ASGIApp:
    app = FastAPI(
        title="edge-spec",
        version=version("edge-spec"),
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    for kind in (RequestValidationError, HTTPException, ApiError, Exception):
        app.add_exception_handler(kind, _refuse)
    add_openai(app, running)
    add_messages(app, running)
    add_ollama(app, running)
    add_llamacpp_paths(app, running)
    add_responses(app, running)
    _add_models(app, running.models, options)
    _add_health(app, running.metrics)
    _add_page(app)
    running.metrics.paths = _paths(app)
    guarded: ASGIApp = Guard(app, options, running.metrics.observe_request)
    if options.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origin_regex="|".join(map(origin_pattern, options.cors_origins)),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # a page of the network that reaches for this machine
            expose_headers=["Retry-After", "X-Should-Retry"],
        )
    return guarded


def _add_models(app: FastAPI, models: Models, options: ServerOptions) -> None:
    started = datetime.now(UTC).replace(microsecond=0)

    def entry(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": int(started.timestamp()),
            "owned_by": "edge-spec",
            "aliases": list(model.aliases),
            "status": {"value": model.status},
        }

    async def describe(name: str | None) -> Description:
        model = models.find(name)
        if model.description is not None:
            return model.description
        async with models.using(model) as opened:
            return opened.description

    @app.get("/v1/models")
    async def all_models(request: Request) -> Any:
        """The models that are served, and which of them are open."""
        if asks_for_its_form(request.headers):
            return models_page(models, started)
        return {"object": "list", "data": [entry(model) for model in models]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> Any:
        """One of them, by its name or an alias."""
        describe = partial(model_document, since=started)
        return (describe if asks_for_its_form(request.headers) else entry)(models.find(model))

    @app.get("/edge-spec/info")
    async def what_runs(model: str | None = None) -> Mapping[str, Any]:
        """What answers, and the drafters that requests may ask for. This opens the model."""
        return (await describe(model)).info

    @app.get("/props")
    async def settings(model: str | None = None) -> Mapping[str, Any]:
        """How conversations are answered, as llama.cpp's server tells it. This opens the model."""
        return (await describe(model)).props

    @app.get("/edge-spec/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        """What runs the model, who drafts, and why. This opens the model."""
        return {"plan": (await describe(model)).info["plan"]}


def _add_health(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def figures() -> Response:
        """Answers Prometheus."""
        return Response(metrics.text(), headers={"content-type": MEDIA_TYPE})


def _add_page(app: FastAPI) -> None:
    page = load_assets()

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        asset = page.get(name)
        if asset is None:
            raise ApiError(404, "There is no such file.")
        return Response(asset.content, 200, {"cache-control": "no-cache"}, asset.media_type)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await static(INDEX)


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the response to a request that is refused or that failed."""
    path = request.scope["path"]
    if isinstance(error, RequestValidationError):
        faults = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
        told = refused_body(faults, error.body)
    elif not isinstance(error, HTTPException):
        told = api_error(error)
    elif taken := (error.headers or {}).get("Allow"):
        allow = {"Allow": f"{taken.replace('GET', 'GET, HEAD')}, OPTIONS"}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        told = ApiError(405, f"{path} takes {taken}, not {request.method}.", headers=allow)
    elif error.status_code == 404:
        told = ApiError(404, f"There is no {path[:200]} here. {_hint(request.app, path)}")
    else:
        told = ApiError(error.status_code, f"{error.detail}.", headers=error.headers or {})
    return error_response(told, MESSAGES if asks_for_its_form(request.headers) else path)


def _paths(app: FastAPI) -> list[str]:
    routes = [route.path for route in app.routes if isinstance(route, Route)]
    return [path for path in routes if "{" not in path]


def _hint(app: FastAPI, path: str) -> str:
    if path.startswith("/v1/responses/"):
        return "No response is stored: a request has the whole conversation."
    meant = next((each for each in _paths(app) if path.endswith(each.removeprefix("/v1"))), None)
    usual = f"Send it to {meant}." if meant else "GET /openapi.json lists what there is."
    return _GONE.get(path, usual)
