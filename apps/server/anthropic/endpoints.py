"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.anthropic.documents import FailureDocument, MessageDocument, TokenCount
from edge_spec.apps.server.anthropic.errors import error_document
from edge_spec.apps.server.anthropic.reply import MessageReply
from edge_spec.apps.server.anthropic.request import CountRequest, MessagesRequest
from edge_spec.apps.server.documents import errors_as
from edge_spec.apps.server.errors import OTHER_FORMS
from edge_spec.apps.server.reply import Reply
from edge_spec.apps.server.response import AnswerResponse, Running
from edge_spec.apps.server.work import Desk

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
OTHER_FORMS[MESSAGES] = error_document
_EVENTS = {
    "text/event-stream": {
        "schema": {"description": "Each event is one of Anthropic's, named by its type."}
    }
}
_ERRORS = errors_as(FailureDocument)


def add_messages(app: FastAPI, running: Running) -> None:
    @app.post(
        MESSAGES,
        response_model=None,
        responses={200: {"model": MessageDocument, "content": _EVENTS}, **_ERRORS},
    )
    async def messages(request: MessagesRequest) -> Response:
        """The assistant's next message, in Anthropic's form."""

        def read(desk: Desk) -> tuple[Work, Reply]:
            work = _work(desk, request)
            return work, MessageReply(
                desk.model,
                len(work.prompts[0]),
                request.max_tokens,
                tells_thoughts=request.tells_thoughts,
            )

        return AnswerResponse(running, request.model, read, is_streamed=request.stream)

    @app.post(COUNT, response_model=TokenCount, responses=_ERRORS)
    async def count(request: CountRequest) -> dict[str, int]:
        """The tokens of a conversation with its tools."""
        work = await running.ask(request.model, lambda desk: _work(desk, request))
        return {"input_tokens": len(work.prompts[0])}


def _work(desk: Desk, request: CountRequest) -> Work:
    return desk.chat(request.for_chat())
