"""Turns a request into what an engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec import Engine, Grammar, SamplingParams
from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.messages import AllowedChoice, Choice, NamedTool, Tool, for_template
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.replies import ChatReply, CompletionReply, Envelope
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest, SchemaFormat
from edge_spec.errors import UnsupportedModelError

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
)


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
        prompt = self._prompt(request, tools)
        form = self._engine.parts.text.tool_form() if tools else None
        if form is None:
            _refuse_calls(request.tool_choice)
            grammar = _answer_grammar(request)
        else:
            grammar = form.grammar(
                _callable(request.tool_choice, tools),
                required=_is_required(request.tool_choice),
                several=self._takes_several(request),
                text=_answer_grammar(request),
            )
        more: dict[str, Any] = {} if grammar is None else {"grammar": grammar}
        if request.logprobs:
            more["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        count = request.max_completion_tokens or request.max_tokens
        work = self._work(request, [prompt], count, more)
        envelope = self._envelope("chat.completion", "chatcmpl", request, 1)
        envelope.logprobs = bool(request.logprobs)
        return work, ChatReply(envelope, form)

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
        try:
            return self._engine.chat_prompt(messages, [_shown(tool) for tool in tools])
        except UnsupportedModelError as error:
            raise ApiError(
                400,
                f"{error.shown}. Change messages, or continue a text with POST /v1/completions.",
                param="messages",
            ) from error

    def _takes_several(self, request: ChatRequest) -> bool:
        """Tells whether an answer may have several calls. Models that were not trained to call
        tools repeat the first one: they have to be asked for several."""
        if isinstance(request.tool_choice, NamedTool):
            return False
        if request.parallel_tool_calls is None:
            return self._engine.parts.text.knows_tools
        return request.parallel_tool_calls

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
                "prediction": request.prediction and request.prediction.text,
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


def _refuse_calls(choice: Choice) -> None:
    """Raises ApiError for calls that are asked for where there are no tools."""
    if choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a call: send tools, too.", param="tool_choice")


def _is_required(choice: Choice) -> bool:
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _callable(choice: Choice, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools that an answer may call. Raises ApiError for one that is not there."""
    names = {tool.function.name for tool in tools}
    chosen = names
    if isinstance(choice, NamedTool):
        chosen = {choice.function.name}
    elif isinstance(choice, AllowedChoice):
        chosen = {tool.function.name for tool in choice.allowed_tools.tools}
    if missing := ", ".join(sorted(chosen - names)):
        raise ApiError(
            400, f"tool_choice names {missing}, which tools do not have.", param="tool_choice"
        )
    return [_dump(tool) for tool in tools if tool.function.name in chosen]


def _answer_grammar(request: ChatRequest) -> Grammar | None:
    """Returns what an answer without calls is held to."""
    format = request.response_format
    if isinstance(format, SchemaFormat):
        is_strict = format.json_schema.strict is not False
        return Grammar.json_schema(format.json_schema.json_schema, strict=is_strict)
    return None if format is None or format.type == "text" else Grammar.json_schema()


def _shown(tool: Tool) -> dict[str, Any]:
    """The tool as the model reads of it."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _dump(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)
