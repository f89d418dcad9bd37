"""Answers as OpenAI's clients read them: one document, or events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from edge_spec import FinishReason, GenerationResult
from edge_spec.apps.server.answer import Ended, Round
from edge_spec.apps.server.timings import timings, usage
from edge_spec.apps.server.tool_calls import ToolCallReader

DONE = "data: [DONE]\n\n"


class Reply(Protocol):
    """The form of one reply. Events are texts; "" where there is nothing to tell."""

    def opening(self) -> str: ...

    def piece(self, round_: Round) -> str: ...

    def end(self, ended: Ended) -> str: ...

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]: ...


class Envelope:
    """What all documents of one reply have in common.

    A stream of tokens passes here once a round, so what stays the same is written once.
    """

    def __init__(self, kind: str, streamed_kind: str, model: str, *, tokens: bool) -> None:
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.tokens = tokens
        self._common = {"created": int(time.time()), "model": model}
        self._kind = kind
        fields = json.dumps({"id": self.id, "object": streamed_kind, **self._common})
        self._head = f'data: {fields[:-1]}, "choices": '

    def event(self, choices: str, extra: str = "") -> str:
        """choices: JSON; extra: further members of the document, each after a comma."""
        return f"{self._head}{choices}{extra}}}\n\n"

    def origins(self, of: Round | Ended) -> str:
        """The member `edge_spec` of an event, where it was asked for."""
        if not self.tokens:
            return ""
        is_round = isinstance(of, Round)
        told = {
            "tokens": [token.to_dict() for token in of.chunk.tokens] if is_round else [],
            "predicted_n": of.predicted_n if is_round else len(of.result.tokens),
            "live_per_second": of.live_per_second,
            "plain_per_second": of.plain_per_second,
        }
        return f', "edge_spec": {json.dumps(told)}'

    def document(
        self, choices: Sequence[Any], results: Sequence[GenerationResult], num_prompts: int
    ) -> dict[str, Any]:
        tokens = [token.to_dict() for result in results for token in result.tokens]
        return {
            "id": self.id,
            "object": self._kind,
            **self._common,
            "choices": choices,
            "usage": usage(results, num_prompts),
            "timings": timings(results),
            **({"edge_spec": {"tokens": tokens}} if self.tokens else {}),
        }


def reason_of(result: GenerationResult) -> str:
    """An answer that the server ended early is incomplete, as one that met a limit is."""
    return "stop" if result.finish_reason is FinishReason.STOP else "length"


class ChatReply:
    def __init__(
        self, envelope: Envelope, num_choices: int, *, reads_calls: bool, is_call: bool
    ) -> None:
        self._envelope = envelope
        self._num_choices = num_choices
        self._readers = [
            ToolCallReader(is_call) if reads_calls else None for _ in range(num_choices)
        ]

    def opening(self) -> str:
        choices = [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for index in range(self._num_choices)
        ]
        return self._envelope.event(json.dumps(choices))

    def piece(self, round_: Round) -> str:
        reader, text, calls = self._readers[round_.choice], round_.chunk.text, []
        if reader is not None:
            text, calls = reader.push(text)
        origins = self._envelope.origins(round_)
        if not (text or calls or origins):
            return ""
        delta = json.dumps(_delta(text, calls))
        choice = f'[{{"index": {round_.choice}, "delta": {delta}, "finish_reason": null}}]'
        return self._envelope.event(choice, origins)

    def end(self, ended: Ended) -> str:
        reader = self._readers[ended.choice]
        text, calls = ("", []) if reader is None else reader.finish()
        called = reader is not None and reader.num_calls
        choice = {
            "index": ended.choice,
            "delta": _delta(text, calls),
            "finish_reason": "tool_calls" if called else reason_of(ended.result),
        }
        figures = f', "timings": {json.dumps(timings([ended.result]))}'
        return self._envelope.event(json.dumps([choice]), figures + self._envelope.origins(ended))

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return self._envelope.document(choices, results, num_prompts=1)

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        reader, text, calls = self._readers[index], result.text, []
        if reader is not None:
            text, calls = reader.push(text)
            left, last = reader.finish()
            text, calls = text + left, calls + last
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")} for call in calls
            ]
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else reason_of(result),
        }


def _delta(text: str, calls: Sequence[Any]) -> dict[str, Any]:
    return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})


class CompletionReply:
    def __init__(self, envelope: Envelope, num_prompts: int) -> None:
        self._envelope = envelope
        self._num_prompts = num_prompts

    def opening(self) -> str:
        return ""

    def piece(self, round_: Round) -> str:
        text, origins = round_.chunk.text, self._envelope.origins(round_)
        if not (text or origins):
            return ""
        choice = (
            f'[{{"index": {round_.choice}, "text": {json.dumps(text)}, "finish_reason": null}}]'
        )
        return self._envelope.event(choice, origins)

    def end(self, ended: Ended) -> str:
        choice = {"index": ended.choice, "text": "", "finish_reason": reason_of(ended.result)}
        figures = f', "timings": {json.dumps(timings([ended.result]))}'
        return self._envelope.event(json.dumps([choice]), figures + self._envelope.origins(ended))

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [
            {"index": index, "text": result.text, "finish_reason": reason_of(result)}
            for index, result in enumerate(results)
        ]
        return self._envelope.document(choices, results, self._num_prompts)
