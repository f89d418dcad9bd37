"""The endpoints, and the checks before them: who may ask, how much, and what browsers may do."""

from __future__ import annotations

import asyncio
import hmac
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_spec.apps.server.anthropic import MESSAGES, CountBody, MessageReply, MessagesBody
from edge_spec.apps.server.body import refused_body
from edge_spec.apps.server.catalog import add_models, is_for_anthropic
from edge_spec.apps.server.errors import ApiError, api_error, error_response
from edge_spec.apps.server.llamacpp import FimBody, InfillBody, InfillReply, add_llamacpp_paths
from edge_spec.apps.server.metrics import MEDIA_TYPE, Metrics
from edge_spec.apps.server.models import Models
from edge_spec.apps.server.ollama import OllamaChatBody, OllamaGenerateBody, OllamaReply
from edge_spec.apps.server.openai import ChatBody, ChatReply, CompletionBody, CompletionReply
from edge_spec.apps.server.reply import AnswerResponse, Reply
from edge_spec.apps.server.responses import ResponsesBody, ResponsesReply
from edge_spec.apps.server.schema import AnswerBody
from edge_spec.apps.web import INDEX, STATIC
from edge_spec.cli.options import ServerOptions, origin_pattern

# Endpoints that answer: path, summary, body and reply.
_ANSWERS: Sequence[tuple[str, str, type[AnswerBody], type[Reply]]] = (
    ("/v1/chat/completions", "The assistant's next message", ChatBody, ChatReply),
    ("/v1/completions", "The continuation of a text or of tokens", CompletionBody, CompletionReply),
    ("/v1/responses", "The next items of a conversation", ResponsesBody, ResponsesReply),
    (MESSAGES, "The next message, in Anthropic's form", MessagesBody, MessageReply),
    ("/api/chat", "The next message, in Ollama's form", OllamaChatBody, OllamaReply),
    ("/api/generate", "The answer to a text, in Ollama's form", OllamaGenerateBody, OllamaReply),
    ("/infill", "What stands between two texts, in llama.cpp's form", InfillBody, InfillReply),
    ("/v1/fim/completions", "What stands between two texts, in Mistral's form", FimBody, ChatReply),
)
_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/static/"
_KEY_HEADERS = ("api-key", "x-api-key")  # of clients for Azure's API, or Anthropic's
_ROOMS = ("chat", "completions", "messages", "models", "responses")  # path segments after /v1/
_DISCARDED = 16  # read up to this many times the limit, so that the sender gets the response
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused."},
    "5XX": {"description": "The server fails or is busy."},
}


def build_app(models: Models, options: ServerOptions) -> ASGIApp:
    app = FastAPI(
        title="edge-spec",
        version=version("edge-spec"),
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    for kind in (RequestValidationError, HTTPException, ApiError, Exception):
        app.add_exception_handler(kind, _refuse)
    for each in _ANSWERS:
        _add_answer(app, models, *each)
    _add_counts(app, models)
    add_llamacpp_paths(app, models)
    add_models(app, models)
    _add_health(app, models.metrics)
    _add_page(app)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    models.metrics.paths = [path for path in paths if "{" not in path]
    guarded: ASGIApp = Guard(app, options, models.metrics.observe_request)
    if options.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origin_regex="|".join(map(origin_pattern, options.cors_origins)),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # allowed pages may be on public sites
            expose_headers=["Retry-After", "X-Should-Retry"],
        )
    return guarded


def _add_answer(
    app: FastAPI, models: Models, path: str, told: str, body: type[AnswerBody], reply: type[Reply]
) -> None:
    async def answer(asked: Any) -> Response:
        return AnswerResponse(models, asked, reply)

    answer.__annotations__["asked"] = body  # tells FastAPI how to read the request
    content: dict[int | str, Any] = {200: {"content": {reply.media_type: {}}}}
    app.post(path, summary=told, response_model=None, responses=content)(answer)


def _add_counts(app: FastAPI, models: Models) -> None:
    @app.post(f"{MESSAGES}/count_tokens")
    async def count(body: CountBody) -> dict[str, int]:
        """Return the number of tokens of a conversation with its tools."""
        return {"input_tokens": len((await models.read(body)).prompts[0])}

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody) -> dict[str, Any]:
        """Return the number of tokens that a request has the model read."""
        work = await models.read(body)
        return {"object": "response.input_tokens", "input_tokens": len(work.prompts[0])}


def _add_health(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return ok while the server answers."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def figures() -> Response:
        """Return figures for Prometheus."""
        return Response(metrics.text(), headers={"content-type": MEDIA_TYPE})


def _add_page(app: FastAPI) -> None:
    mimetypes.add_type("text/javascript", ".js")  # Windows' registry may have another type
    mimetypes.add_type("text/css", ".css")
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(INDEX)


async def _refuse(request: Request, error: Exception) -> Response:
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
        there = "GET /openapi.json lists what there is."
        told = ApiError(404, f"There is no {path[:200]} here. {there}")
    else:
        told = ApiError(error.status_code, f"{error.detail}.", headers=error.headers or {})
    return error_response(told, MESSAGES if is_for_anthropic(request.headers) else path)


class Guard:
    """ASGI middleware: check host, key, type and size of a request before `app` sees it, and read
    its body. `app` gets HEAD as GET; the connection leaves the body out."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, observe: Callable[[str, int], None]
    ) -> None:
        """observe: called with path and status of each request."""
        self._app = app
        self._observe = observe
        self._options = options
        self._key = (options.api_key or "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": plain_path(scope["path"])}

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope["path"], message["status"])
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            self._check_key(scope["path"], headers)
            if method == "POST":
                _check_type(headers.get("content-type", ""))
                receive = await self._read(scope, receive)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_guarded)
        except ClientDisconnect:
            pass
        else:
            await self._app(scope, receive, send_guarded)

    def _check_host(self, host: str) -> None:
        """Refuse other hosts' names on loopback. Elsewhere a key is required, which keeps other
        sites' pages out."""
        if self._options.is_loopback and not self._options.allows_host(host):
            raise ApiError(
                403,
                f"This server answers to localhost, not to {host[:100]!r}. Whoever runs it can "
                "allow that name with --allow-host.",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._key or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return
        if not any(hmac.compare_digest(key, self._key) for key in _keys(headers)):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body; return a `receive` that replays it. Raises ApiError, ClientDisconnect."""
        limit, closes = self._options.max_body_bytes, {"Connection": "close"}
        body, num_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(self._options.client_timeout_s):
                async for piece in Request(scope, receive).stream():
                    num_bytes += len(piece)
                    if num_bytes <= limit:
                        body += piece
                    elif num_bytes > _DISCARDED * limit:
                        break
        except TimeoutError:
            raise ApiError(408, "The body took too long.", headers=closes) from None
        if num_bytes > limit:
            told = f"The body has more than {limit} bytes."
            raise ApiError(413, told, code="request_too_large", headers=closes)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay


def _keys(headers: Headers) -> Iterator[bytes]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip().encode("latin-1")
    for name in _KEY_HEADERS:
        if name in headers:
            yield headers[name].strip().encode("latin-1")


def _check_type(kind: str) -> None:
    """Refuse forms: another site may send them without permission, but never as JSON."""
    if kind.lower().partition(";")[0].strip() != "application/json":
        raise ApiError(415, "The body has to be JSON: Content-Type: application/json.")


def plain_path(path: str) -> str:
    """Return the path without doubled slashes, and with one /v1 where it belongs."""
    parts = [part for part in path.split("/") if part]
    while parts[:2] == ["v1", "v1"]:
        del parts[0]
    if parts and parts[0] in _ROOMS:
        parts.insert(0, "v1")
    return "/" + "/".join(parts)
