"""The endpoints that llama.cpp's server has beside OpenAI's, and Mistral's for a text between two
others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from edge_spec.apps.server import documents
from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.llamacpp_reply import LlamaCppReply
from edge_spec.apps.server.llamacpp_requests import (
    DetokenizeRequest,
    InfillRequest,
    LlamaCppRequest,
    TextRequest,
    TokenizeRequest,
)
from edge_spec.apps.server.llamacpp_work import (
    completion_work,
    detokenized,
    fim_work,
    infill_work,
    rendered,
    tokenized,
)
from edge_spec.apps.server.open_model import OpenModel
from edge_spec.apps.server.replies import chat_reply
from edge_spec.apps.server.reply import Reply
from edge_spec.apps.server.response import AnswerResponse, Running
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest
from edge_spec.apps.server.work import Desk

LLAMACPP_PATHS = (
    "/infill",
    "/v1/fim/completions",
    "/completion",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/slots",
)
_EVENTS = {"text/event-stream": {"schema": {"description": "Each data is a piece of the text."}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": documents.LlamaCppCompletion, "content": _EVENTS}
}


def add_llamacpp_paths(app: FastAPI, running: Running) -> None:
    _add_texts(app, running)
    _add_descriptions(app, running)


def _add_texts(app: FastAPI, running: Running) -> None:
    def respond(request: LlamaCppRequest, work_of: Callable[[Desk], Work]) -> Response:
        def read(desk: Desk) -> tuple[Work, Reply]:
            work = work_of(desk)
            (prompt,) = desk.texts(work.prompts)
            return work, LlamaCppReply(
                request, work, desk.model, desk.engine.context_length, prompt
            )

        return AnswerResponse(running, request.model, read, is_streamed=request.stream)

    @app.post("/infill", response_model=None, responses=_RESPONSES)
    async def infill(request: InfillRequest) -> Response:
        """What stands between two texts, such as those around a cursor."""
        return respond(request, lambda desk: infill_work(desk, request))

    @app.post("/completion", response_model=None, responses=_RESPONSES)
    async def completion(request: TextRequest) -> Response:
        """The continuation of a text, or of token ids, without a chat template."""
        return respond(request, lambda desk: completion_work(desk, request))

    @app.post(
        "/v1/fim/completions",
        response_model=None,
        responses={200: {"model": documents.ChatCompletion}},
    )
    async def fim(request: CompletionRequest) -> Response:
        """What stands between a prompt and its suffix, in the form of Mistral's API."""

        def read(desk: Desk) -> tuple[Work, Reply]:
            work = fim_work(desk, request)
            return work, chat_reply(request, work, desk.model)

        return AnswerResponse(running, request.model, read, is_streamed=request.stream)


def _add_descriptions(app: FastAPI, running: Running) -> None:
    @app.get("/slots", response_model=list[documents.SlotDocument])
    async def slots(
        model: str | None = None, fail_on_no_slot: int | None = None
    ) -> list[dict[str, Any]]:
        """The places for answers of a model, if it is open, and which of them are taken."""
        opened = running.models.find(model or None).opened
        told = [] if opened is None else [_slot(opened, at) for at in range(len(opened.pool.slots))]
        if fail_on_no_slot and told and all(each["is_processing"] for each in told):
            raise ApiError(503, "All slots are taken.", headers={"Retry-After": "1"})
        return told

    @app.post("/tokenize", response_model=documents.Tokenized)
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text."""
        return {"tokens": await running.ask(request.model, lambda desk: tokenized(desk, request))}

    @app.post("/detokenize", response_model=documents.Detokenized)
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens, control tokens written out."""
        return {
            "content": await running.ask(request.model, lambda desk: detokenized(desk, request))
        }

    @app.post("/apply-template", response_model=documents.AppliedTemplate)
    async def apply_template(request: ChatRequest) -> dict[str, Any]:
        """The prompt that the chat template makes of a request."""
        return {"prompt": await running.ask(request.model, lambda desk: rendered(desk, request))}


def _slot(opened: OpenModel, at: int) -> dict[str, Any]:
    slot = opened.pool.slots[at]
    return {
        "id": at,
        "n_ctx": slot.engine.context_length,
        "speculative": slot.engine.drafter != "none",
        "is_processing": opened.pool.is_busy(slot),
    }
