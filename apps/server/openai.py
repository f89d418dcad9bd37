"""OpenAI's chat and text completions: bodies and replies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edge_spec import Chunk, GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Round, Work
from edge_spec.apps.server.body import MAX_INT, Message
from edge_spec.apps.server.errors import ApiError, refused
from edge_spec.apps.server.reply import (
    Reply,
    chat_logprobs,
    completion_logprobs,
    origin_of,
    reason_of,
    server_event,
    timings,
    usage,
)
from edge_spec.apps.server.schema import (
    MAX_CHOICES,
    Alternatives,
    AnswerBody,
    ConversationBody,
    Gap,
    Request,
)

_DONE = "data: [DONE]\n\n"


class ChatBody(ConversationBody):
    messages: Annotated[list[Message], Field(min_length=1)]

    def request(self) -> Request:
        messages = [message.for_template() for message in self.messages]
        return replace(super().request(), messages=messages)

    def _goes_on(self) -> bool | None:
        return self.continue_final_message or any(m.prefix for m in self.messages[-1:]) or None


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1, fail_fast=True)
]
_Several = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Prompt = str | TokenIds | Annotated[list[str], _Several] | Annotated[list[TokenIds], _Several]


class CompletionBody(AnswerBody):
    """Asks for the continuation of a text."""

    prompt: Prompt
    logprobs: Alternatives | Literal[False] | None = None  # false: none, as in chat requests
    echo: bool | None = False
    suffix: str | None = None  # what follows the answer; "": unknown

    def request(self) -> Request:
        if self.echo and (self.suffix or self._num_logprobs is not None):
            raise refused("echo", "goes without logprobs and suffix.")
        if self.suffix and not isinstance(self.prompt, str):
            raise refused("suffix", "needs a prompt that is one text.")
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Sequence[Any] = [self.prompt] if is_one else self.prompt
        gap = Gap(prompts[0], self.suffix) if self.suffix else None
        return replace(super().request(), prompts=prompts, gap=gap, logprobs=self._num_logprobs)

    @property
    def _num_logprobs(self) -> int | None:
        if self.logprobs is None or self.logprobs is False:
            return self.n_probs or None
        return max(self.logprobs, self.n_probs or 0)


def _reason(result: GenerationResult) -> str:
    """Return the finish reason. One that ends within a tool call counts as cut, like a text."""
    called = result.tool_calls and not result.is_cut
    return "tool_calls" if called else reason_of(result)


class ChatReply(Reply):
    """Choices, each the assistant's next message; a stream of them ends with [DONE]."""

    kind, streamed = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    member, piece_member = "message", "delta"  # key of a choice's text, and of its pieces
    nothing: ClassVar[Any] = {}  # the piece in a choice's last event

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.streamed,
            "created": int(time.time()),
            "model": self._model,
        }
        self._has_logprobs = work.request.logprobs is not None
        self._results: list[GenerationResult] = []
        self._num_calls = [0] * len(work.prompts)

    def opening(self) -> str:
        begun = enumerate(self._begun())
        choices = [_choice(index, self.piece_member, said) for index, said in begun]
        return self._event(choices) if choices else ""

    def piece(self, round_: Round) -> str:
        choice, chunk = round_.choice, round_.chunk
        said, origins, logprobs = self._said(choice, chunk), self._origins(round_), None
        if not (said or origins or (self._has_logprobs and chunk.tokens)):
            return ""
        if self._has_logprobs:
            logprobs = self._logprobs(choice, chunk.tokens)
        return self._event([_choice(choice, self.piece_member, said, logprobs)], **origins)

    def end(self, round_: Round, result: GenerationResult) -> str:
        self._results.append(result)
        last = _choice(round_.choice, self.piece_member, self.nothing, None, _reason(result))
        event = self._event([last], timings=timings([result]), **self._origins(round_))
        if not self._request.body.tells_usage or len(self._results) < len(self.work.prompts):
            return event
        return event + self._event([], usage=usage(self._results, self._request.body.num_choices))

    def closing(self) -> str:
        return _DONE

    def failure(self, error: ApiError) -> str:
        return super().failure(error) + _DONE

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        tokens = [origin_of(token) for result in results for token in result.tokens]
        choices = []
        for index, result in enumerate(results):
            logprobs = self._logprobs(index, result.tokens) if self._has_logprobs else None
            said = self._all_said(index, result)
            choices.append(_choice(index, self.member, said, logprobs, _reason(result)))
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage(results, self._request.body.num_choices),
            "timings": timings(results),
            **({"edge_spec": {"tokens": tokens}} if self._request.body.speculation.tokens else {}),
        }

    def _event(self, choices: Sequence[Any], **others: Any) -> str:
        if self._request.body.tells_usage:
            others.setdefault("usage", None)
        return server_event({**self._head, "choices": choices, **others})

    def _origins(self, of: Round) -> dict[str, Any]:
        if not self._request.body.speculation.tokens:
            return {}
        live = {
            "tokens": [origin_of(token) for token in of.chunk.tokens],
            "predicted_n": of.predicted_n,
            "plain_per_second": of.plain_per_second,
        }
        return {"edge_spec": live}

    def _begun(self) -> Sequence[Any]:
        return [{"role": "assistant", "content": ""}] * len(self.work.prompts)

    def _said(self, choice: int, chunk: Chunk) -> Any:
        """Return what a chunk adds to a choice. A call's first piece has index, id and name; the
        arguments follow."""
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
        return {"reasoning_content": chunk.text} if self._request.tells_thoughts else {}

    def _all_said(self, choice: int, result: GenerationResult) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.reasoning and self._request.tells_thoughts:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.text or None
            message["tool_calls"] = result.tool_calls
        return message

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return chat_logprobs(tokens)


def _choice(
    index: int, member: str, said: Any, logprobs: Any = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, member: said, "logprobs": logprobs, "finish_reason": reason}


class CompletionReply(ChatReply):
    """Choices, each the continuation of a text."""

    kind = streamed = "text_completion"
    prefix = "cmpl"
    member = piece_member = "text"
    nothing = ""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        decode = work.model.engine.parts.text.tokenizer.decode
        self._echoed = list(map(decode, work.prompts)) if work.request.body.echo else []
        self._offsets = [0] * len(work.prompts)  # of the next token in the choice's text

    def _begun(self) -> Sequence[Any]:
        return self._echoed

    def _said(self, choice: int, chunk: Chunk) -> str:
        return chunk.text

    def _all_said(self, choice: int, result: GenerationResult) -> str:
        return self._echoed[choice] + result.text if self._echoed else result.text

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offset = self._offsets[choice]
        self._offsets[choice] += sum(len(token.text) for token in tokens)
        return completion_logprobs(tokens, offset)
