"""The reply: a response with its items, or the events that tell of them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from edge_spec import FinishReason, GenerationResult
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.logprobs import chat_logprobs
from edge_spec.apps.server.replies import origin_of
from edge_spec.apps.server.reply import Reply, server_event
from edge_spec.apps.server.responses.output import Fields, Output
from edge_spec.apps.server.responses.request import ResponsesRequest
from edge_spec.apps.server.timings import timings, usage
from edge_spec.text.parts.part import PartKind

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

    def closing(self) -> str:
        return ""

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
