"""Answers of the Responses API, made of items while they are written, and its endpoints."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.responses import Response

from edge_spec import FinishReason, GenerationResult, PartKind
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.replies import chat_logprobs, origin_of, timings, usage
from edge_spec.apps.server.reply import (
    EVENTS,
    AnswerResponse,
    Reply,
    Running,
    sealed,
    server_event,
)
from edge_spec.apps.server.responses.parse import ResponsesRequest
from edge_spec.apps.server.work import Desk

Fields = dict[str, Any]


class _Form(NamedTuple):
    """The names of an item of the output, and of the events about it. member: of the item, in which
    the part with its text is; a call has no part."""

    prefix: str  # of its id
    type: str
    text: str  # in events
    text_type: str = ""  # of the part
    member: str = ""
    part: str = ""  # in events


_FORMS = {
    PartKind.TEXT: _Form("msg", "message", "output_text", "output_text", "content", "content_part"),
    PartKind.REASONING: _Form(
        "rs", "reasoning", "reasoning_text", "reasoning_text", "content", "content_part"
    ),
    PartKind.CALL: _Form("fc", "function_call", "function_call_arguments"),
}
_SUMMARY = _Form(
    *("rs", "reasoning", "reasoning_summary_text", "summary_text"),
    *("summary", "reasoning_summary_part"),
)


_REPEATED: Fields = {  # fields of the request, and their values where it does not say
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


class ResponsesReply(Reply):
    """The items of an answer, in the order in which they are written."""

    is_folded = True

    def __init__(self, request: ResponsesRequest, work: Work, desk: Desk) -> None:
        self._request = request
        self._has_scores = request.num_logprobs is not None
        self._num_events = 0
        self._items: list[Fields] = []  # that are complete
        self._early_scores: list[Any] = []  # of tokens that have no text until now
        # The item that is being written: its kind and form, what there is of it, and the beginning
        # of the event for a piece of it.
        self._open: PartKind | None = None
        self._form = _SUMMARY
        self._item: Fields = {}
        self._text = ""
        self._scores: list[Any] = []
        self._place: Fields = {}
        self._delta = ""
        (options,) = work.options
        self._response: Fields = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": desk.model,
            "output": [],
            "usage": None,
            **{name: request.as_sent(name, value) for name, value in _REPEATED.items()},
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": options["sampling"].temperature,
            "top_p": options["sampling"].top_p,
        }

    def opening(self) -> str:
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def piece(self, round_: Round) -> str:
        chunk, told = round_.chunk, ""
        scores: list[Any] = []
        if self._has_scores and chunk.kind is PartKind.TEXT:
            scores = chat_logprobs(chunk.tokens)["content"]
        if chunk.kind is PartKind.REASONING and not self._request.tells_thoughts:
            return ""
        if chunk.call is not None:
            space, name = self._request.called(chunk.call.name)
            named = {"namespace": space, "name": name} if space else {"name": name}
            told = self._begin(PartKind.CALL, call_id=chunk.call.id, **named)
        elif chunk.kind is not self._open:
            self._early_scores += scores
            if not chunk.text:  # the beginning of a character, or space after a call
                return ""
            scores, self._early_scores = self._early_scores, []
            told = self._begin(chunk.kind)
        return told + self._add(chunk.text, scores) if chunk.text or scores else told

    def end(self, ended: Ended) -> str:
        result = ended.result
        is_complete = result.finish_reason is FinishReason.STOP
        told = self._finish(is_complete=is_complete, is_cut=result.is_cut)
        self._response |= {
            "status": "completed" if is_complete else "incomplete",
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": _usage(result),
            "timings": timings([result]),
        }
        if self._request.asks_origins:
            self._response["edge_spec"] = {"tokens": [origin_of(each) for each in result.tokens]}
        return told + self._event(self._response["status"], response=self._response)

    def failure(self, error: ApiError) -> str:
        num_events = self._num_events
        self._finish(is_complete=False, is_cut=True)  # what there is, untold
        self._num_events = num_events
        self._response |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
            "output": self._items,
        }
        return self._event("failed", response=self._response)

    def document(self, results: Sequence[GenerationResult]) -> Fields:
        return self._response

    def _begin(self, kind: PartKind, **fields: Any) -> str:
        """Begins an item. fields: of a call."""
        told = self._end("completed")
        is_summary = kind is PartKind.REASONING and self._request.summarizes
        form = self._form = _SUMMARY if is_summary else _FORMS[kind]
        if kind is PartKind.TEXT:
            fields = {"role": "assistant", "content": []}
        elif kind is PartKind.REASONING:
            fields = {"summary": []}
        id = f"{form.prefix}_{secrets.token_hex(16)}"
        self._open, self._text, self._scores = kind, "", []
        self._item = {"id": id, "type": form.type, "status": "in_progress", **fields}
        told += self._of_item("added")
        self._place = {"output_index": len(self._items), "item_id": id}
        if form.member:
            self._place[f"{form.member}_index"] = 0
            told += self._event(f"{form.part}.added", **self._place, part=self._part())
        # A stream passes here once a round: what stays the same is written once.
        name = f"response.{form.text}.delta"
        same = json.dumps({"type": name, **self._place})
        self._delta = f'event: {name}\ndata: {same[:-1]}, "delta": '
        return told

    def _add(self, text: str, scores: list[Any]) -> str:
        self._text += text
        told = f"{self._delta}{json.dumps(text)}"
        if self._open is PartKind.TEXT:
            self._scores += scores
            told += f', "logprobs": {json.dumps(scores)}'
        self._num_events += 1
        return f'{told}, "sequence_number": {self._num_events - 1}}}\n\n'

    def _finish(self, *, is_complete: bool, is_cut: bool) -> str:
        """A complete answer has a message or a call, be the message empty: clients look for one.

        is_cut: it has ended within a call.
        """
        told = ""
        if is_complete and self._open in (None, PartKind.REASONING):
            told = self._begin(PartKind.TEXT)
        is_whole = not is_cut if self._open is PartKind.CALL else is_complete
        return told + self._end("completed" if is_whole else "incomplete")

    def _end(self, status: str) -> str:
        """Ends the item that is being written, if there is one."""
        if self._open is None:
            return ""
        form, item = self._form, self._item
        if self._open is PartKind.CALL:
            done = {"name": item["name"], "arguments": self._text}
            told = self._event(f"{form.text}.done", **self._place, **done)
        else:
            part = self._part()
            item[form.member] = [part]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            told = self._event(f"{form.text}.done", **self._place, **done)
            told += self._event(f"{form.part}.done", **self._place, part=part)
        item["status"] = status
        told += self._of_item("done")
        self._items.append(self._document())
        self._open = None
        return told

    def _part(self) -> Fields:
        part: Fields = {"type": self._form.text_type, "text": self._text}
        if self._open is PartKind.TEXT:
            part |= {"annotations": [], "logprobs": self._scores}
        return part

    def _document(self) -> Fields:
        """Returns the item with what is known of it."""
        if self._open is PartKind.CALL:
            return {**self._item, "arguments": self._text}
        if self._open is PartKind.REASONING and self._request.seals_thoughts:
            return {**self._item, "encrypted_content": sealed(self._text)}
        return self._item

    def _of_item(self, what: str) -> str:
        item = self._document()
        return self._event(f"output_item.{what}", output_index=len(self._items), item=item)

    def _event(self, name: str, /, **fields: Any) -> str:
        told = {"type": f"response.{name}", **fields, "sequence_number": self._num_events}
        self._num_events += 1
        return server_event(json.dumps(told), told["type"])


def _usage(result: GenerationResult) -> dict[str, Any]:
    counted = usage([result], 1)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": result.reasoning_n,
            **counted.get("completion_tokens_details", {}),
        },
        "total_tokens": counted["total_tokens"],
    }


def add_responses(app: FastAPI, running: Running) -> None:
    @app.post("/v1/responses", response_model=None, responses=EVENTS)
    async def responses(request: ResponsesRequest) -> Response:
        """The next items of a conversation."""
        return AnswerResponse(running, request, Desk.chat, ResponsesReply)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: ResponsesRequest) -> dict[str, Any]:
        """How many tokens a request has the model read."""
        work = await running.ask(request.model, lambda desk: desk.chat(request))
        return {"object": "response.input_tokens", "input_tokens": len(work.prompts[0])}
