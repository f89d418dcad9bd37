"""The endpoints of the Responses API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.reply import Reply
from edge_spec.apps.server.response import AnswerResponse, Running
from edge_spec.apps.server.responses.documents import ResponseDocument, TokenCount
from edge_spec.apps.server.responses.reply import ResponsesReply
from edge_spec.apps.server.responses.request import ResponsesRequest
from edge_spec.apps.server.responses.truncation import work_of
from edge_spec.apps.server.work import Desk

_EVENTS = {
    "text/event-stream": {
        "schema": {"description": "Each event is one of OpenAI's, named by its type."}
    }
}


def add_responses(app: FastAPI, running: Running) -> None:
    @app.post(
        "/v1/responses",
        response_model=None,
        responses={200: {"model": ResponseDocument, "content": _EVENTS}},
    )
    async def responses(request: ResponsesRequest) -> Response:
        """The next items of a conversation."""

        def read(desk: Desk) -> tuple[Work, Reply]:
            work = work_of(desk, request)
            return work, ResponsesReply(request, work, desk.model)

        return AnswerResponse(running, request.model, read, is_streamed=request.stream)

    @app.post("/v1/responses/input_tokens", response_model=TokenCount)
    async def input_tokens(request: ResponsesRequest) -> dict[str, Any]:
        """How many tokens a request has the model read."""
        work = await running.ask(request.model, lambda desk: work_of(desk, request))
        return {"object": "response.input_tokens", "input_tokens": len(work.prompts[0])}

    _add_refusals(app)


def _add_refusals(app: FastAPI) -> None:
    """Answers whoever asks for a response of earlier."""

    async def not_stored() -> Response:
        raise ApiError(
            404,
            "No response is stored here: a request has the whole conversation, and its answer is "
            "told once.",
        )

    for path, method in (
        ("/v1/responses/{id}", "GET"),
        ("/v1/responses/{id}", "DELETE"),
        ("/v1/responses/{id}/cancel", "POST"),
        ("/v1/responses/{id}/input_items", "GET"),
        ("/v1/responses/compact", "POST"),
    ):
        app.add_api_route(path, not_stored, methods=[method], include_in_schema=False)
