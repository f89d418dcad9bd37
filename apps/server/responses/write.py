"""Answers of the Responses API, made of items while they are written, and its endpoints."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from edge_spec import Chunk, FinishReason, GenerationResult
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.figures import chat_logprobs, timings, usage
from edge_spec.apps.server.replies import origin_of
from edge_spec.apps.server.reply import Reply, sealed, server_event
from edge_spec.apps.server.response import EVENTS, AnswerResponse, Running
from edge_spec.apps.server.responses.parse import ResponsesRequest
from edge_spec.text.parts.part import PartKind

Fields = dict[str, Any]
_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_TYPES = {
    PartKind.TEXT: "message",
    PartKind.REASONING: "reasoning",
    PartKind.CALL: "function_call",
}


class OutputItem(ABC):
    """One item of the output. Each method returns the events that tell of what it is told."""

    def __init__(self, kind: PartKind, index: int, **fields: Any) -> None:
        """index: its place in the output. fields: of its document, beside those of all items."""
        self.kind = kind
        self.text = ""
        self._index = index
        self._item: Fields = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"}
        self._item |= {"type": _TYPES[kind], "status": "in_progress", **fields}

    @abstractmethod
    def document(self) -> Fields:
        """Returns the item with what is known of it."""

    def begin(self) -> Iterator[Fields]:
        yield self._event("output_item.added", item=self.document())

    @abstractmethod
    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]: ...

    def end(self, status: str) -> Iterator[Fields]:
        self._item["status"] = status
        yield self._event("output_item.done", item=self.document())

    def _event(self, event: str, /, **fields: Any) -> Fields:
        return {"type": f"response.{event}", "output_index": self._index, **fields}

    def _inner(self, event: str, /, **fields: Any) -> Fields:
        """Makes an event that is about something within the item."""
        return self._event(event, item_id=self._item["id"], **fields)


class TextOutput(OutputItem):
    """A message, or a thought: one part with a text."""

    def __init__(
        self, kind: PartKind, index: int, *, is_summary: bool = False, is_sealed: bool = False
    ) -> None:
        """is_summary: a thought is told as its own summary. is_sealed: it is told sealed, too."""
        is_message = kind is PartKind.TEXT
        fields: Fields = {"role": "assistant", "content": []} if is_message else {"summary": []}
        super().__init__(kind, index, **fields)
        self._is_sealed = is_sealed
        self._scores: list[Any] | None = [] if is_message else None
        self._member = "summary" if is_summary else "content"
        self._place = {f"{self._member}_index": 0}
        self._of_part = "reasoning_summary_part" if is_summary else "content_part"
        self._of_text = "output_text" if is_message else "reasoning_text"
        self._type = self._of_text
        if is_summary:
            self._of_text, self._type = "reasoning_summary_text", "summary_text"

    def document(self) -> Fields:
        sealed_text = {"encrypted_content": sealed(self.text)} if self._is_sealed else {}
        return {**self._item, **sealed_text}

    def begin(self) -> Iterator[Fields]:
        yield from super().begin()
        yield self._inner(f"{self._of_part}.added", **self._place, part=self._part())

    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]:
        self.text += text
        told: Fields = {"delta": text}
        if self._scores is not None:
            self._scores += scores
            told["logprobs"] = scores
        yield self._inner(f"{self._of_text}.delta", **self._place, **told)

    def end(self, status: str) -> Iterator[Fields]:
        part = self._part()
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._inner(f"{self._of_text}.done", **self._place, **told)
        yield self._inner(f"{self._of_part}.done", **self._place, part=part)
        yield from super().end(status)

    def _part(self) -> Fields:
        """Returns the part with its text, as the item has it from now on."""
        part: Fields = {"type": self._type, "text": self.text}
        if self._scores is not None:
            part |= {"annotations": [], "logprobs": list(self._scores)}
        self._item = {**self._item, self._member: [part]}
        return part


class CallOutput(OutputItem):
    def __init__(self, index: int, call_id: str, namespace: str | None, name: str) -> None:
        space = {"namespace": namespace} if namespace else {}
        self._name = name
        super().__init__(PartKind.CALL, index, call_id=call_id, **space, name=name)

    def document(self) -> Fields:
        return {**self._item, "arguments": self.text}

    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]:
        self.text += text
        yield self._inner("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Iterator[Fields]:
        told = {"name": self._name, "arguments": self.text}
        yield self._inner("function_call_arguments.done", **told)
        yield from super().end(status)


class Output:
    """The items of one answer, in the order in which they are written. What is told of them does
    not depend on whether anybody hears the events."""

    def __init__(
        self,
        called: Callable[[str], tuple[str | None, str]],
        *,
        tells_thoughts: bool,
        summarizes: bool,
        seals_thoughts: bool,
    ) -> None:
        """called: the namespace and the own name of a function that the model calls."""
        self._called = called
        self._tells_thoughts = tells_thoughts
        self._summarizes = summarizes
        self._seals_thoughts = seals_thoughts
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._early_scores: list[Any] = []  # of tokens that have no text until now

    def documents(self) -> list[Fields]:
        return [item.document() for item in self._items]

    def push(self, chunk: Chunk, scores: list[Any]) -> Iterator[Fields]:
        """scores: of the tokens of a text, where they are asked for."""
        if chunk.call is not None:
            space, name = self._called(chunk.call.name)
            yield from self._begin(CallOutput(len(self._items), chunk.call.id, space, name))
        is_open = self._open is not None and self._open.kind is chunk.kind
        if chunk.kind is PartKind.REASONING and not self._tells_thoughts:
            return
        if not chunk.text and not is_open:  # the beginning of a character, or space after a call
            self._early_scores += scores
            return
        if not is_open:
            scores, self._early_scores = [*self._early_scores, *scores], []
            yield from self._begin(self._made(chunk.kind))
        if self._open is not None and (chunk.text or scores):
            yield from self._open.piece(chunk.text, scores)

    def finish(self, *, is_complete: bool, is_cut: bool) -> Iterator[Fields]:
        """A complete answer has a message or a call, be the message empty: clients look for one.

        is_cut: it has ended within a call.
        """
        is_thought = self._open is not None and self._open.kind is PartKind.REASONING
        if is_complete and (self._open is None or is_thought):
            yield from self._begin(self._made(PartKind.TEXT))
        is_called = self._open is not None and self._open.kind is PartKind.CALL
        is_whole = not is_cut if is_called else is_complete
        yield from self._end("completed" if is_whole else "incomplete")

    def _made(self, kind: PartKind) -> OutputItem:
        if kind is PartKind.TEXT:
            return TextOutput(kind, len(self._items))
        told = {"is_summary": self._summarizes, "is_sealed": self._seals_thoughts}
        return TextOutput(kind, len(self._items), **told)

    def _begin(self, item: OutputItem) -> Iterator[Fields]:
        yield from self._end("completed")
        self._items.append(item)
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is not None:
            yield from self._open.end(status)
        self._open = None


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
    """Events are made of the same items as the response that is told whole."""

    def __init__(self, request: ResponsesRequest, work: Work, model: str) -> None:
        self._has_scores = request.num_logprobs is not None
        self._has_origins = request.asks_origins
        self._output = Output(
            request.called,
            tells_thoughts=request.tells_thoughts,
            summarizes=request.summarizes,
            seals_thoughts=request.seals_thoughts,
        )
        self._num_events = 0
        (options,) = work.options
        self._response: Fields = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": model,
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
        begun = ("response.created", "response.in_progress")
        return self._events({"type": name, "response": self._response} for name in begun)

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        scores: list[Any] = []
        if self._has_scores and chunk.kind is PartKind.TEXT:
            scores = chat_logprobs(chunk.tokens)["content"]
        return self._events(self._output.push(chunk, scores))

    def collect(self, round_: Round) -> None:
        self.piece(round_)

    def end(self, ended: Ended) -> str:
        result = ended.result
        is_complete = result.finish_reason is FinishReason.STOP
        told = self._events(self._output.finish(is_complete=is_complete, is_cut=result.is_cut))
        self._response |= {
            "status": "completed" if is_complete else "incomplete",
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "usage": _usage(result),
            "timings": timings([result]),
        }
        if self._has_origins:
            self._response["edge_spec"] = {"tokens": [origin_of(each) for each in result.tokens]}
        return told + self._last(self._response["status"])

    def failure(self, error: ApiError) -> str:
        list(self._output.finish(is_complete=False, is_cut=True))  # what there is, untold
        self._response |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        return self._last("failed")

    def document(self, results: Sequence[GenerationResult]) -> Fields:
        (result,) = results
        self.end(Ended(0, result, len(result.tokens), None, None))
        return self._response

    def _last(self, name: str) -> str:
        self._response["output"] = self._output.documents()
        return self._events([{"type": f"response.{name}", "response": self._response}])

    def _events(self, events: Iterable[Fields]) -> str:
        told = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            told.append(server_event(json.dumps(numbered), event["type"]))
            self._num_events += 1
        return "".join(told)


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
        return AnswerResponse(
            running,
            request,
            lambda desk: desk.chat(request),
            lambda desk, work: ResponsesReply(request, work, desk.model),
        )

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: ResponsesRequest) -> dict[str, Any]:
        """How many tokens a request has the model read."""
        work = await running.ask(request.model, lambda desk: desk.chat(request))
        return {"object": "response.input_tokens", "input_tokens": len(work.prompts[0])}
