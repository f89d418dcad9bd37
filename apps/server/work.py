"""Turns a request into what an engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec import Engine, Grammar, SamplingParams
from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.replies import ChatReply, CompletionReply, Envelope
from edge_spec.apps.server.schema import (
    ChatRequest,
    CompletionRequest,
    NamedTool,
    SchemaFormat,
    Tool,
    for_template,
)

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
)
_ANY_ARGUMENTS = {"type": "object"}


class Desk:
    """Reads requests for one model. Any thread may ask it: it changes nothing."""

    def __init__(self, model: str, engine: Engine, options: ServerOptions) -> None:
        """model: its name, as answers have it."""
        self.model = model
        self.drafter = engine.drafter
        self._engine = engine
        self._options = options

    def chat(self, request: ChatRequest) -> tuple[Work, ChatReply]:
        """Raises EdgeSpecError, ApiError, UnicodeEncodeError."""
        tools = [] if request.tool_choice == "none" else request.tools or []
        grammar, is_call = _grammar(request, tools)
        prompt = self._prompt(request, tools)
        more: dict[str, Any] = {} if grammar is None else {"grammar": grammar}
        if request.logprobs:
            more["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        count = request.max_completion_tokens or request.max_tokens
        work = self._work(request, [prompt], count, more)
        envelope = self._envelope("chat.completion", "chatcmpl", request, 1)
        envelope.logprobs = bool(request.logprobs)
        return work, ChatReply(envelope, reads_calls=bool(tools), is_call=is_call)

    def completion(self, request: CompletionRequest) -> tuple[Work, CompletionReply]:
        """Raises EdgeSpecError, UnicodeEncodeError."""
        prompts = self._prompts(request.prompt)
        more = {} if request.logprobs is None else {"logprobs": request.logprobs}
        work = self._work(request, prompts, request.max_tokens, more)
        envelope = self._envelope("text_completion", "cmpl", request, len(prompts))
        envelope.logprobs = request.logprobs is not None
        return work, CompletionReply(envelope)

    def _envelope(
        self, kind: str, prefix: str, request: ChatRequest | CompletionRequest, num_prompts: int
    ) -> Envelope:
        return Envelope(
            kind,
            prefix,
            self.model,
            num_prompts * request.num_choices,
            request.num_choices,
            origins=request.speculative is not None and request.speculative.tokens,
            usage=bool(request.stream_options and request.stream_options.include_usage),
        )

    def _prompt(self, request: ChatRequest, tools: Sequence[Tool]) -> Sequence[int]:
        messages = [for_template(message) for message in request.messages]
        if not tools:
            return self._engine.chat_prompt(messages)
        return self._engine.chat_prompt(
            messages, [tool.model_dump(exclude_none=True) for tool in tools]
        )

    def _prompts(self, prompt: Any) -> list[Sequence[int]]:
        encode = self._engine.encode
        if isinstance(prompt, str):
            return [encode(prompt)]
        if isinstance(prompt[0], int):
            return [prompt]
        return [encode(each) if isinstance(each, str) else each for each in prompt]

    def _work(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        more: Mapping[str, Any],
    ) -> Work:
        choices = [
            {
                "max_tokens": max_tokens or self._options.max_tokens,
                "stop": request.stops,
                "sampling": self._sampling(request, choice),
                **more,
            }
            for choice in range(request.num_choices)
        ]
        asked = request.speculative and request.speculative.drafter
        return Work(
            prompts=[prompt for prompt in prompts for _ in choices],
            options=[options for _ in prompts for options in choices],
            drafter=asked or self.drafter,
            session_id=request.session_id,
        )

    def _sampling(self, request: ChatRequest | CompletionRequest, choice: int) -> SamplingParams:
        given = {
            name: getattr(request, name) for name in _SAMPLING if getattr(request, name) is not None
        }
        if request.seed is not None:
            given["seed"] = request.seed_of(choice)
        if request.logit_bias:
            given["logit_bias"] = {int(id): bias for id, bias in request.logit_bias.items()}
        return SamplingParams(**{**vars(self._options.sampling), **given})


def _grammar(request: ChatRequest, tools: Sequence[Tool]) -> tuple[Grammar | None, bool]:
    """What the text is held to, and whether that makes it one call of a tool."""
    format = request.response_format
    is_text = format is None or format.type == "text"
    choice = request.tool_choice
    if choice == "required" or isinstance(choice, NamedTool):
        if not is_text:
            raise ApiError(400, "A call has its own form.", param="response_format")
        return Grammar.json_schema(_call_schema(tools, choice)), True
    if is_text:
        return None, False
    if tools:
        raise ApiError(
            400,
            "The text cannot be JSON and still call a tool: set tool_choice to none or required.",
            param="response_format",
        )
    schema = format.json_schema.json_schema if isinstance(format, SchemaFormat) else None
    return Grammar.json_schema(schema), False


def _call_schema(tools: Sequence[Tool], choice: Any) -> Mapping[str, Any]:
    """Raises ApiError for a tool that is not there."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
    if not functions:
        raise ApiError(400, "There is no such tool.", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.parameters or _ANY_ARGUMENTS,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
