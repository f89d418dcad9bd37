"""The endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edge_spec.apps.server.addresses import origin_pattern
from edge_spec.apps.server.anthropic.write import (
    COUNT,
    MESSAGES,
    add_messages,
    asks_for_its_form,
    found_model,
    models_page,
)
from edge_spec.apps.server.errors import ApiError, api_error
from edge_spec.apps.server.fields import refused_body
from edge_spec.apps.server.guard import Guard
from edge_spec.apps.server.llamacpp import LLAMACPP_PATHS, add_llamacpp_paths
from edge_spec.apps.server.metrics import MEDIA_TYPE, Metrics
from edge_spec.apps.server.models import Models, ServedModel
from edge_spec.apps.server.ollama import OLLAMA_PATHS, add_ollama
from edge_spec.apps.server.open_model import Description
from edge_spec.apps.server.options import NO_PLAN, ServerOptions
from edge_spec.apps.server.replies import ChatReply, CompletionReply
from edge_spec.apps.server.reply import EVENTS, AnswerResponse, Running
from edge_spec.apps.server.responses.write import add_responses
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest
from edge_spec.apps.server.work import Desk
from edge_spec.apps.web import INDEX, load_assets

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    MESSAGES,
    COUNT,
    *LLAMACPP_PATHS,
    "/v1/responses",
    "/v1/models",
    *OLLAMA_PATHS,
    "/health",
    "/metrics",
    "/openapi.json",
    "/edge-spec/info",
    "/edge-spec/plan",
    "/props",
    "/",
)
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
    _add_errors(app)
    _add_answers(app, running)
    add_messages(app, running)
    add_ollama(app, running)
    add_llamacpp_paths(app, running)
    add_responses(app, running)
    _add_list(app, running.models)
    _add_descriptions(app, running.models, options)
    _add_health(app, running.metrics)
    _add_page(app)
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


def _add_answers(app: FastAPI, running: Running) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=EVENTS)
    async def chat(request: ChatRequest) -> Response:
        """The assistant's next message."""
        return AnswerResponse(running, request, Desk.chat, ChatReply)

    @app.post("/v1/completions", response_model=None, responses=EVENTS)
    async def completions(request: CompletionRequest) -> Response:
        """The continuation of a text, or of token ids, without a chat template."""
        return AnswerResponse(running, request, Desk.completion, CompletionReply)


def _add_list(app: FastAPI, models: Models) -> None:
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

    @app.get("/v1/models")
    async def all_models(request: Request) -> Any:
        """The models that are served, and which of them are open."""
        if asks_for_its_form(request.headers):
            return JSONResponse(models_page(models, started))
        return {"object": "list", "data": [entry(model) for model in models]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> Any:
        """One of them, by its name or an alias."""
        if asks_for_its_form(request.headers):
            return found_model(models, model, started)
        return entry(models.find(model))


def _add_descriptions(app: FastAPI, models: Models, options: ServerOptions) -> None:
    async def describe(model: ServedModel) -> Description:
        if model.description is None:
            async with models.using(model) as opened:
                return opened.description
        return model.description

    @app.get("/edge-spec/info")
    async def what_runs(model: str | None = None) -> Mapping[str, Any]:
        """What answers, and which drafters requests may ask for. A model that was never open is
        opened."""
        return (await describe(models.find(model))).info

    @app.get("/props")
    async def settings(model: str | None = None) -> Mapping[str, Any]:
        """How a conversation with the model is answered, as llama.cpp's server tells it. A model
        that was never open is opened."""
        return (await describe(models.find(model))).props

    @app.get("/edge-spec/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        """What `edge-spec plan` measured for this model, if it did."""
        served = models.find(model)
        if served.on_demand is None:
            return dict(options.plan)
        await describe(served)  # it is here
        planned = await asyncio.to_thread(served.on_demand.plan)
        return dict(planned or NO_PLAN)


def _add_health(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.get(
        "/metrics",
        response_model=None,
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def figures() -> Response:
        """Answers Prometheus."""
        return Response(metrics.text(), headers={"content-type": MEDIA_TYPE})


def _add_page(app: FastAPI) -> None:
    page = load_assets()

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in page:
            raise ApiError(404, "There is no such file.")
        asset = page[name]
        headers = {"cache-control": "no-cache"}
        return Response(asset.content, media_type=asset.media_type, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await static(INDEX)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _response(request, refused_body(error.errors()[0], error.body))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        headers = error.headers or {}
        if "Allow" in headers:
            return _other_method(request, headers["Allow"])
        if error.status_code == 404:
            return _response(request, _no_such_path(request))
        return _response(request, ApiError(error.status_code, f"{error.detail}."), headers)

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return _response(request, error)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return _response(request, api_error(error))


def _other_method(request: Request, taken: str) -> Response:
    """Answers a method that a path does not take. OPTIONS asks for just this."""
    headers = {"Allow": f"{taken.replace('GET', 'GET, HEAD')}, OPTIONS"}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    told = f"{request.scope['path']} takes {taken}, not {request.method}."
    return _response(request, ApiError(405, told), headers)


def _no_such_path(request: Request) -> ApiError:
    path = request.scope["path"]
    meant = next((each for each in PATHS if path.endswith(each.removeprefix("/v1"))), None)
    hint = f"Send it to {meant}." if meant else "GET /openapi.json lists what there is."
    hint = _GONE.get(path, hint)
    if path.startswith("/v1/responses/"):
        hint = "No response is stored: a request has the whole conversation."
    return ApiError(404, f"There is no {path[:200]} here. {hint}")


def _response(
    request: Request, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        error.body(request.scope["path"]),
        error.status,
        {**error.headers, **(headers or {})},
        "application/json",
    )
