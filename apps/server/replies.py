"""Answers as OpenAI's clients read them: one document, or events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from edge_spec import Chunk, FinishReason, GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.figures import chat_logprobs, completion_logprobs, timings, usage
from edge_spec.apps.server.reply import Reply, server_event
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest

DONE = server_event("[DONE]")


def origin_of(token: Token) -> dict[str, Any]:
    """Tells where a token came from; its probability has a place of its own."""
    part = {} if token.kind is PartKind.TEXT else {"kind": token.kind.value}
    named = {"drafter": token.drafter} if token.drafter else {}
    return {"id": token.id, "text": token.text, "origin": token.origin.value, **part, **named}


def reason_of(result: GenerationResult) -> str:
    """An answer that the server ended early is incomplete, as one that met a limit is."""
    return "stop" if result.finish_reason is FinishReason.STOP else "length"


class _ChoicesReply(Reply):
    """A reply whose documents have choices, and whose stream ends with [DONE]."""

    kind: ClassVar[str]
    prefix: ClassVar[str]  # of its id
    streamed: ClassVar[str]  # the kind of its events

    def __init__(self, request: ChatRequest | CompletionRequest, work: Work, model: str) -> None:
        self._common = {"created": int(time.time()), "model": model}
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._num_choices = len(work.prompts)
        self._choices_a_prompt = request.num_choices
        self._tells_origins = request.asks_origins  # of each token
        self._has_logprobs = request.num_logprobs is not None
        # Asks for an event of its own at the end of a stream.
        self._tells_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._results: list[GenerationResult] = []
        fields = json.dumps({"id": self._id, "object": self.streamed, **self._common})
        # A stream passes here once a round: what stays the same is written once.
        self._head = f'data: {fields[:-1]}, "choices": '
        self._tail = ', "usage": null}\n\n' if self._tells_usage else "}\n\n"

    def end(self, ended: Ended) -> str:
        choice = json.dumps([self._last_choice(ended.choice, ended.result)])
        self._results.append(ended.result)
        event = self._event(choice, self._beside(ended))
        if not self._tells_usage or len(self._results) < self._num_choices:
            return event
        counted = json.dumps(usage(self._results, self._choices_a_prompt))
        return f'{event}{self._head}[], "usage": {counted}}}\n\n'

    def closing(self) -> str:
        return DONE

    def failure(self, error: ApiError) -> str:
        return server_event(json.dumps(error.document())) + DONE

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        tokens = [origin_of(token) for result in results for token in result.tokens]
        return {
            "id": self._id,
            "object": self.kind,
            **self._common,
            "choices": [self._whole_choice(index, each) for index, each in enumerate(results)],
            "usage": usage(results, self._choices_a_prompt),
            "timings": timings(results),
            **({"edge_spec": {"tokens": tokens}} if self._tells_origins else {}),
        }

    def _event(self, choices: str, extra: str = "") -> str:
        """choices: JSON; extra: further members of the document, each after a comma."""
        return f"{self._head}{choices}{extra}{self._tail}"

    def _beside(self, of: Round | Ended) -> str:
        """Members of an event: figures of a choice that has ended, and what was asked for."""
        told = ""
        if isinstance(of, Ended):
            told = f', "timings": {json.dumps(timings([of.result]))}'
        if not self._tells_origins:
            return told
        tokens = of.chunk.tokens if isinstance(of, Round) else ()
        live = {
            "tokens": [origin_of(token) for token in tokens],
            "predicted_n": of.predicted_n,
            "live_per_second": of.live_per_second,
            "plain_per_second": of.plain_per_second,
        }
        return f'{told}, "edge_spec": {json.dumps(live)}'

    @abstractmethod
    def _last_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """Returns what is left of a choice at the end of its stream."""

    @abstractmethod
    def _whole_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """Returns a choice with its text."""


class ChatReply(_ChoicesReply):
    """The assistant's next message."""

    kind = "chat.completion"
    prefix = "chatcmpl"
    streamed = "chat.completion.chunk"

    def __init__(self, request: ChatRequest | CompletionRequest, work: Work, model: str) -> None:
        super().__init__(request, work, model)
        self._tells_thoughts = isinstance(request, CompletionRequest) or request.tells_thoughts
        self._num_calls = [0] * self._num_choices

    def opening(self) -> str:
        choices = [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(self._num_choices)
        ]
        return self._event(json.dumps(choices))

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        delta = self._delta(round_.choice, chunk)
        beside, logprobs = self._beside(round_), "null"
        tokens = chunk.tokens if self._has_logprobs else ()
        if not (delta or beside or tokens):
            return ""
        if self._has_logprobs:
            logprobs = json.dumps(chat_logprobs(tokens))
        return self._event(
            f'[{{"index": {round_.choice}, "delta": {json.dumps(delta)}, '
            f'"logprobs": {logprobs}, "finish_reason": null}}]',
            beside,
        )

    def _delta(self, choice: int, chunk: Chunk) -> dict[str, Any]:
        """Returns what a chunk adds to the message: of a call, index, id and name first, then the
        arguments as they come."""
        if chunk.kind is PartKind.CALL:
            head: dict[str, Any] = {}
            function = {"arguments": chunk.text}
            if chunk.call is not None:
                self._num_calls[choice] += 1
                head = {"id": chunk.call.id, "type": "function"}
                function = {"name": chunk.call.name, **function}
            elif not chunk.text:
                return {}
            call = {"index": self._num_calls[choice] - 1, **head, "function": function}
            return {"tool_calls": [call]}
        if not chunk.text:
            return {}
        if chunk.kind is PartKind.TEXT:
            return {"content": chunk.text}
        return {"reasoning_content": chunk.text} if self._tells_thoughts else {}

    def _last_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": _reason(result),
        }

    def _whole_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.reasoning and self._tells_thoughts:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.text or None
            message["tool_calls"] = result.tool_calls
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(result.tokens) if self._has_logprobs else None,
            "finish_reason": _reason(result),
        }


def _reason(result: GenerationResult) -> str:
    """An answer that ends within a call is cut, as one that ends within a text is."""
    called = result.tool_calls and not result.is_cut
    return "tool_calls" if called else reason_of(result)


class CompletionReply(_ChoicesReply):
    """The continuation of a text."""

    kind = streamed = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, request: CompletionRequest, work: Work, model: str, echoes: Sequence[str]
    ) -> None:
        """echoes: the prompts, one a choice, where they are shown before what continues them."""
        super().__init__(request, work, model)
        self._echoes = echoes
        self._offsets = [0] * self._num_choices  # of the next token in the choice's text

    def opening(self) -> str:
        choices = [_completion(index, text, None, None) for index, text in enumerate(self._echoes)]
        return self._event(json.dumps(choices)) if choices else ""

    def piece(self, round_: Round) -> str:
        text, beside = round_.chunk.text, self._beside(round_)
        if not (text or beside or (self._has_logprobs and round_.chunk.tokens)):
            return ""
        logprobs = self._logprobs(round_.choice, round_.chunk.tokens)
        choice = _completion(round_.choice, text, logprobs, None)
        return self._event(json.dumps([choice]), beside)

    def _last_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        return _completion(index, "", None, reason_of(result))

    def _whole_choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        logprobs = self._logprobs(index, result.tokens)
        text = self._echoes[index] + result.text if self._echoes else result.text
        return _completion(index, text, logprobs, reason_of(result))

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        offset = self._offsets[choice]
        self._offsets[choice] += sum(len(token.text) for token in tokens)
        return completion_logprobs(tokens, offset)


def _completion(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
