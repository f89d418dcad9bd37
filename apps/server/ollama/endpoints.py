"""The endpoints of Ollama's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.body import Body
from edge_spec.apps.server.documents import Document, errors_as
from edge_spec.apps.server.errors import OTHER_FORMS
from edge_spec.apps.server.field_names import OtherNames
from edge_spec.apps.server.models import Models, ServedModel
from edge_spec.apps.server.ollama.reply import OllamaReply
from edge_spec.apps.server.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from edge_spec.apps.server.open_model import OpenModel
from edge_spec.apps.server.reply import Reply
from edge_spec.apps.server.response import AnswerResponse, Running
from edge_spec.apps.server.work import Desk

OLLAMA_PATHS = ("/api/chat", "/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version")
_SPOKEN = "0.12.0"  # the version of Ollama whose API this is: clients refuse older ones
_LATEST = ":latest"  # which clients add to names
OTHER_FORMS.update(dict.fromkeys(OLLAMA_PATHS, lambda error: {"error": error.message}))


class FailureText(Document):
    error: str


_ERRORS = errors_as(FailureText)
_LINES = {200: {"content": {OllamaReply.media_type: {}}}, **_ERRORS}


class ShowRequest(Body):
    other_names = OtherNames(also={"name": "model"}, keeps_others=True)
    model: str


def add_ollama(app: FastAPI, running: Running) -> None:
    _add_models(app, running.models)

    async def answer(request: OllamaChatRequest) -> Response:
        model = running.models.find(_plain_name(running.models, request.model) or None)
        reply = OllamaReply(request, model.name)
        continued = request.continued()
        if not request.messages and continued is None:
            async with running.models.using(model):
                return JSONResponse(reply.opened())

        def read(desk: Desk) -> tuple[Work, Reply]:
            return desk.chat(request) if continued is None else desk.completion(continued), reply

        streamed = request.stream is not False
        return AnswerResponse(running, model.name, read, is_streamed=streamed)

    @app.post("/api/chat", response_model=None, responses=_LINES)
    async def chat(request: OllamaChatRequest) -> Response:
        """The assistant's next message, in Ollama's form."""
        return await answer(request)

    @app.post("/api/generate", response_model=None, responses=_LINES)
    async def generate(request: OllamaGenerateRequest) -> Response:
        """The answer to a text, or its continuation, in Ollama's form."""
        return await answer(request)


def _add_models(app: FastAPI, models: Models) -> None:
    since = datetime.now(UTC).isoformat()

    def entry(model: ServedModel) -> dict[str, Any]:
        named = {"name": model.name, "model": model.name}
        return {**named, "digest": "", "size": 0, "modified_at": since, "details": {}}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models that are served."""
        return {"models": [entry(model) for model in models]}

    @app.get("/api/ps")
    async def open_models() -> dict[str, Any]:
        """Those that are open."""
        return {"models": [entry(model) for model in models if model.opened is not None]}

    @app.post("/api/show", responses=_ERRORS)
    async def show(request: ShowRequest) -> dict[str, Any]:
        """One of them, and what it can do."""
        async with models.using(models.find(_plain_name(models, request.model))) as opened:
            return {"modified_at": since, **_shown(opened)}

    @app.get("/api/version")
    async def spoken() -> dict[str, str]:
        """The version of Ollama whose API this is."""
        return {"version": _SPOKEN}


def _plain_name(models: Models, name: str | None) -> str | None:
    known = [each for model in models for each in (model.name, *model.aliases)]
    return name if name is None or name in known else name.removesuffix(_LATEST)


def _shown(opened: OpenModel) -> dict[str, Any]:
    engine = opened.desk.engine
    text, architecture = engine.parts.text, engine.parts.model.config.architecture
    able = ["completion", *(("tools",) if text.chat_template else ())]
    if text.chat_template and text.answer_form(()) is not None:
        able.append("thinking")
    return {
        "template": text.chat_template or "",
        "details": {"family": architecture, "families": [architecture]},
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": engine.context_length,
        },
        "capabilities": able,
    }
