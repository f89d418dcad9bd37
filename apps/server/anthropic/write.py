"""Answers, errors and lists of models in the form of Anthropic's API, and its endpoints."""

from __future__ import annotations

import json
import secrets
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from edge_spec import FinishReason, GenerationResult, PartKind, Stats
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.anthropic.parse import CountRequest, MessagesRequest
from edge_spec.apps.server.errors import OTHER_FORMS, ApiError
from edge_spec.apps.server.models import Models, ServedModel
from edge_spec.apps.server.reply import (
    EVENTS,
    AnswerResponse,
    Reply,
    Running,
    arguments_of,
    sealed,
    server_event,
)
from edge_spec.apps.server.work import Desk
from edge_spec.text.parts.part import CallHead

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_document(error: ApiError) -> dict[str, Any]:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told: dict[str, Any] = {"type": _TYPES.get(error.status, other), "message": error.message}
    if error.param == "thread":  # clients that read this ask again without one
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}


def asks_for_its_form(headers: Mapping[str, str]) -> bool:
    """Tells whether a request for models, whose paths two APIs share, is of Anthropic's."""
    return "anthropic-version" in headers


def _document(model: ServedModel, since: datetime) -> dict[str, Any]:
    """Describes one; its limits are known once it was open."""
    limit = model.description and model.description.info["context_length"]
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": since.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def found_model(models: Models, name: str, since: datetime) -> Response:
    try:
        return JSONResponse(_document(models.find(name), since))
    except ApiError as error:
        return JSONResponse(error_document(error), error.status)


def models_page(models: Models, since: datetime) -> dict[str, Any]:
    """All of them: there is one page."""
    data = [_document(model, since) for model in models]
    first, last = data[0]["id"], data[-1]["id"]
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


class MessageReply(Reply):
    """The assistant's next message: blocks, in the order in which the model wrote them. Where
    thoughts are not asked for, their signatures alone stand in it."""

    is_folded = True

    def __init__(self, request: MessagesRequest, work: Work, desk: Desk) -> None:
        self._max_tokens = request.max_tokens
        self._tells_thoughts = request.tells_thoughts
        self._content: list[dict[str, Any]] = []  # blocks that are complete, and the open one
        self._open: PartKind | None = None  # the kind of the last block, while it goes on
        self._written = ""  # in it: a thought, or the arguments of a call
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": desk.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Stats(prompt_n=len(work.prompts[0]))),
        }

    def opening(self) -> str:
        return _event("message_start", message=self._message) + _event("ping")

    def waiting(self) -> str:
        return _event("ping")

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        if not chunk.text and chunk.call is None:
            return ""
        events = ""
        if chunk.kind is not self._open or chunk.call is not None:
            events = self._close() + self._begin(chunk.kind, chunk.call)
        return events + self._add(chunk.text)

    def end(self, ended: Ended) -> str:
        told, result = self._close(), ended.result
        reason, stop = self._reason(result)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = _usage(result.stats, result.reasoning_n)
        self._message |= {**delta, "usage": usage}
        return told + _event("message_delta", delta=delta, usage=usage)

    def closing(self) -> str:
        return _event("message_stop")

    def failure(self, error: ApiError) -> str:
        return server_event(json.dumps(error_document(error)), "error")

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self._message

    def _reason(self, result: GenerationResult) -> tuple[str, str | None]:
        """Returns why the message has ended, and the stop string that ended it."""
        if result.finish_reason is FinishReason.STOP:
            if result.stop is not None:
                return "stop_sequence", result.stop
            has_called = any(block["type"] == "tool_use" for block in self._content)
            return ("tool_use" if has_called else "end_turn"), None
        is_full = result.finish_reason is FinishReason.LENGTH
        if is_full and result.stats.predicted_n < self._max_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None

    # What a stream is told of its blocks.

    def _begin(self, kind: PartKind, call: CallHead | None) -> str:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind is PartKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._open, self._written = kind, ""
        self._content.append(block)
        return self._of_block("start", content_block=block)

    def _add(self, text: str) -> str:
        self._written += text
        if self._open is PartKind.CALL:
            return self._delta("input_json", partial_json=text)
        kind = "text" if self._open is PartKind.TEXT else "thinking"
        if kind == "thinking" and not self._tells_thoughts:
            return ""
        self._content[-1][kind] += text
        return self._delta(kind, **{kind: text})

    def _close(self) -> str:
        if self._open is None:
            return ""
        told, block = "", self._content[-1]
        if self._open is PartKind.REASONING:
            block["signature"] = self._signature(self._written)
            told = self._delta("signature", signature=block["signature"])
        elif self._open is PartKind.CALL:
            block["input"] = arguments_of(self._written)
        self._open = None
        return told + self._of_block("stop")

    def _signature(self, thought: str) -> str:
        """Returns what a client sends back with the thought: many drop one without a signature.
        Where the thought is not told, the model gets it back with it."""
        if not self._tells_thoughts:
            return sealed(thought)
        return b64encode(sha256(thought.encode("utf-8", "replace")).digest()).decode()

    def _delta(self, kind: str, **delta: str) -> str:
        return self._of_block("delta", delta={"type": f"{kind}_delta", **delta})

    def _of_block(self, what: str, **fields: Any) -> str:
        return _event(f"content_block_{what}", index=len(self._content) - 1, **fields)


def _usage(stats: Stats, reasoning_n: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_n - stats.cached_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_n,
        "output_tokens": stats.predicted_n,
        "output_tokens_details": {"thinking_tokens": reasoning_n},
    }


def _event(kind: str, **fields: Any) -> str:
    return server_event(json.dumps({"type": kind, **fields}), kind)


MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
OTHER_FORMS[MESSAGES] = error_document


def add_messages(app: FastAPI, running: Running) -> None:
    @app.post(MESSAGES, response_model=None, responses=EVENTS)
    async def messages(request: MessagesRequest) -> Response:
        """The assistant's next message, in Anthropic's form."""
        return AnswerResponse(running, request, _work, MessageReply)

    @app.post(COUNT)
    async def count(request: CountRequest) -> dict[str, int]:
        """The tokens of a conversation with its tools."""
        work = await running.ask(request.model, lambda desk: _work(desk, request))
        return {"input_tokens": len(work.prompts[0])}


def _work(desk: Desk, request: CountRequest) -> Work:
    return desk.chat(request.for_chat())
