"""The endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from edge_spec import Engine
from edge_spec.apps.server.errors import ApiError, api_error
from edge_spec.apps.server.guard import Guard
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.page import load_page
from edge_spec.apps.server.replies import ChatReply, CompletionReply, Envelope, Reply
from edge_spec.apps.server.response import AnswerResponse, Running
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest
from edge_spec.apps.server.work import Desk, Work


def build_app(engine: Engine, running: Running, desk: Desk, options: ServerOptions) -> ASGIApp:
    app = FastAPI(title="edge-spec", version=version("edge-spec"), docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_answers(app, running, desk)
    _add_descriptions(app, engine, desk, options)
    _add_page(app)
    return Guard(app, options)


def _add_answers(app: FastAPI, running: Running, desk: Desk) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Response:
        """The assistant's next message."""
        desk.check_model(request.model)

        async def work() -> tuple[Work, Reply]:
            asked = await asyncio.to_thread(desk.chat, request)
            reply = ChatReply(
                _envelope("chat.completion", "chat.completion.chunk", desk, request),
                len(asked.prompts),
                reads_calls=False,
                is_call=False,
            )
            return asked, reply

        return AnswerResponse(running, work, is_streamed=bool(request.stream))

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        """The continuation of a text, or of token ids, without a chat template."""
        desk.check_model(request.model)

        async def work() -> tuple[Work, Reply]:
            asked = await asyncio.to_thread(desk.completion, request)
            envelope = _envelope("text_completion", "text_completion", desk, request)
            return asked, CompletionReply(envelope, len(asked.prompts) // request.num_choices)

        return AnswerResponse(running, work, is_streamed=bool(request.stream))


def _envelope(
    kind: str, streamed_kind: str, desk: Desk, request: ChatRequest | CompletionRequest
) -> Envelope:
    speculative = request.speculative
    tokens = speculative is not None and speculative.tokens
    return Envelope(kind, streamed_kind, desk.model, tokens=tokens)


def _add_descriptions(app: FastAPI, engine: Engine, desk: Desk, options: ServerOptions) -> None:
    started = int(time.time())
    model = {"id": desk.model, "object": "model", "created": started, "owned_by": "edge-spec"}
    info = {
        "model": desk.model,
        "runtime": engine.parts.runtime,
        "drafter": desk.drafter,
        "drafters": ["auto", "none", *options.drafters],
        "context_length": engine.parts.model.config.context_length,
        "version": version("edge-spec"),
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/edge-spec/info")
    async def what_runs() -> dict[str, Any]:
        return info

    @app.get("/edge-spec/plan")
    async def plan() -> dict[str, Any]:
        """What `edge-spec plan` measured for this model, if it did."""
        return dict(options.plan)


def _add_page(app: FastAPI) -> None:
    page = load_page()

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in page:
            raise ApiError(404, "There is no such file.")
        content, media_type = page[name]
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await static("index.html")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            return _response(ApiError(400, "The body is no valid JSON."))
        message = f"{'.'.join(where) or 'The body'}: {first['msg']}."
        return _response(ApiError(400, message, param=where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _response(ApiError(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return _response(error)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> Response:
        return _response(api_error(error))


def _response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        error.body(), error.status, {**error.headers, **(headers or {})}, "application/json"
    )
