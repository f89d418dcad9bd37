"""Turns a request into what an engine is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

from edge_spec import Engine, Grammar, SamplingParams
from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.messages import (
    Choice,
    NamedTool,
    Tool,
    for_template,
    joined,
)
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.schema import NO_LIMIT, AnswerRequest, ChatRequest, CompletionRequest
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.parts.answer_form import AnswerForm, answer_tokens

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_NOT_SHOWN: Any = {"function": {"strict"}}  # to the model


class Desk:
    """Reads requests for one model. Any thread may ask it: it changes nothing."""

    def __init__(self, model: str, engine: Engine, options: ServerOptions) -> None:
        """model: its name, as answers have it."""
        self.model = model
        self.engine = engine
        self.drafter = engine.drafter
        self._options = options

    def chat(self, request: ChatRequest) -> Work:
        """Raises EdgeSpecError, ApiError, UnicodeEncodeError."""
        text, tools = self.engine.parts.text, request.tools or []
        if request.tool_choice == "none":
            tools = []
        shown = [each.model_dump(exclude_none=True, exclude=_NOT_SHOWN) for each in tools]
        self._require_read(request)
        named: dict[str, Any] = {
            "template_kwargs": request.template_kwargs or None,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.goes_on,
            "reasoning": request.thinking or self._options.reasoning,
        }
        options = {name: value for name, value in named.items() if value is not None}
        try:
            messages = [for_template(message) for message in request.messages]
            prompt = self.engine.chat_prompt(messages, shown, **options)
        except UnsupportedModelError as error:
            field = request.shown_as.get("messages", "messages")
            told = f"Change {field}, or continue a text with POST /v1/completions."
            raise ApiError(400, f"{error.shown}. {told}", param=field) from error
        form = text.answer_form(prompt, shown, **options)
        if form is not None and request.has_thoughts_in_text:
            form = replace(form, tells_thought=False)
        return self._work(request, [prompt], self._chat_grammar(request, tools), form)

    def completion(self, request: CompletionRequest) -> Work:
        """Raises EdgeSpecError, ApiError, UnicodeEncodeError."""
        if request.suffix:
            assert isinstance(request.prompt, str)  # as the request was checked to have
            return self.between(request, request.prompt, request.suffix)
        return self._work(request, self._prompts(request.prompt), _grammar(request))

    def between(
        self,
        request: AnswerRequest,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        **form: Any,
    ) -> Work:
        """Returns what is asked for to stand between two texts. files, form: of the prompt, as
        `Engine.infill_prompt` takes them. Raises as `completion` does."""
        limit = request.limit or self._options.max_tokens
        prompt = self.engine.infill_prompt(
            prefix, suffix, files, max_tokens=None if limit == NO_LIMIT else limit, **form
        )
        return self._work(request, [prompt], _grammar(request))

    def texts(self, prompts: Iterable[Sequence[int]]) -> list[str]:
        return list(map(self.engine.parts.text.tokenizer.decode, prompts))

    def _chat_grammar(self, request: ChatRequest, tools: Sequence[Tool]) -> Grammar | None:
        """Return what the answer is held to. Raises ApiError."""
        choice, form = request.tool_choice, request.form
        calls = self.engine.parts.text.tool_form() if tools else None
        if calls is None:
            if choice not in (None, "none", "auto"):
                told = "tool_choice asks for a call: send tools, too."
                raise ApiError(400, told, param="tool_choice")
            return _grammar(request)
        if form is not None and not form.is_json:
            told = f"{form.field} does not go with tools: send a JSON Schema, or no tools."
            raise ApiError(400, told, param=form.field.partition(".")[0])
        several = request.parallel_tool_calls
        if several is None:  # who was not trained to call tools repeats the first one
            several = self.engine.parts.text.knows_tools
        required = choice in ("required", "any") or isinstance(choice, NamedTool)
        text = _grammar(request)
        with _naming("tools"):
            return calls.grammar(
                _callable(choice, tools),
                required=required,
                several=several and not isinstance(choice, NamedTool),
                text=text,
            )

    def _require_read(self, request: ChatRequest) -> None:
        """Raises ApiError for a variable that the chat template does not read, where its value asks
        for something."""
        asked = request.required_kwargs
        for name in sorted(asked - self.engine.parts.text.template_variables) if asked else ():
            field = name if name in ChatRequest.model_fields else "chat_template_kwargs"
            raise ApiError(
                400,
                f"{field} gives this model's chat template {name}, which it does not read: leave "
                "it out, or ask for another model.",
                param=field,
            )

    def _prompts(self, prompt: Any) -> list[Sequence[int]]:
        encode = self.engine.encode
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [encode(each) if isinstance(each, str) else each for each in prompt]

    def _work(
        self,
        request: AnswerRequest,
        prompts: Sequence[Sequence[int]],
        grammar: Grammar | None,
        form: AnswerForm | None = None,
    ) -> Work:
        if request.ignore_eos and grammar is not None:
            raise ApiError(
                400,
                "ignore_eos keeps an answer of a given form from its end: leave one of them out.",
                param="ignore_eos",
            )
        limit, options = request.limit, self._options
        if limit is None and options.max_tokens is not None:
            limit = answer_tokens(form, options.max_tokens, options.thought_tokens)
        asked: dict[str, Any] = {
            "max_tokens": None if limit == NO_LIMIT else limit,
            "stop": request.stops,
            "stop_token_ids": request.stop_token_ids,
            "prediction": request.prediction and joined(request.prediction.content),
            "logprobs": request.num_logprobs,
            "grammar": grammar,
            "form": form,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        choices = [
            {**given, "sampling": self._sampling(request, choice)}
            for choice in range(request.num_choices)
        ]
        drafter = request.speculative and request.speculative.drafter
        return Work(
            prompts=[prompt for prompt in prompts for _ in choices],
            options=[options for _ in prompts for options in choices],
            drafter=drafter or self.drafter,
            session_id=request.session_id,
        )

    def _sampling(self, request: AnswerRequest, choice: int) -> SamplingParams:
        """Raises ApiError for penalties that are to look at the last tokens alone."""
        asked: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING}
        asked["seed"] = request.seed_of(choice)
        if asked["top_k"] == -1:
            asked["top_k"] = 0
        biases = {int(id): bias for id, bias in (request.logit_bias or {}).items()}
        if request.ignore_eos:
            biases |= dict.fromkeys(self.engine.parts.text.eos_ids, -inf)
        asked["logit_bias"] = biases or None
        given = {name: value for name, value in asked.items() if value is not None}
        params, last = replace(self._options.sampling, **given), request.repeat_last_n
        if params.penalized and last not in (None, -1) and last < self.engine.context_length:
            told = "but penalties are of all tokens: leave it out or send -1."
            raise ApiError(400, f"repeat_last_n is {last}, {told}", param="repeat_last_n")
        return params


def _callable(choice: Choice | None, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools that an answer may call. Raises ApiError for one that is not there."""
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            told = f"tool_choice names {name}, which tools do not have."
            raise ApiError(400, told, param="tool_choice")
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _grammar(request: AnswerRequest) -> Grammar | None:
    """Returns what an answer without calls is held to. Raises ApiError for a schema that cannot be
    held."""
    form = request.form
    if form is None:
        return None
    if form.is_json:
        with _naming(form.field):
            form.grammar.held()
    return form.grammar


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Names the field that a refusal is about."""
    try:
        yield
    except UsageError as error:
        raise ApiError(400, f"{field}: {error}", param=field.partition(".")[0]) from error
