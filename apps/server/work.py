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
from edge_spec.apps.server.messages import AllowedChoice, Choice, NamedTool, Tool, for_template
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
        tools = [] if request.tool_choice == "none" else request.tools or []
        prompt = self._prompt(request, tools)
        form = self.engine.parts.text.tool_form() if tools else None
        if form is None:
            _refuse_calls(request.tool_choice)
            grammar = _grammar(request)
        else:
            text = _json_grammar(request)
            with _naming("tools"):
                grammar = form.grammar(
                    _callable(request.tool_choice, tools),
                    required=_is_required(request.tool_choice),
                    several=self._takes_several(request),
                    text=text,
                )
        parts = self._answer_form(request, prompt, tools)
        return self._work(request, [prompt], grammar, parts)

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

    def _prompt(self, request: ChatRequest, tools: Sequence[Tool]) -> Sequence[int]:
        messages = [for_template(message) for message in request.messages]
        self._require_read(request)
        try:
            return self.engine.chat_prompt(
                messages,
                [_shown(tool) for tool in tools],
                **self._template_options(request),
            )
        except UnsupportedModelError as error:
            field = request.shown_as.get("messages", "messages")
            raise ApiError(
                400,
                f"{error.shown}. Change {field}, or continue a text with POST /v1/completions.",
                param=field,
            ) from error

    def _answer_form(
        self, request: ChatRequest, prompt: Sequence[int], tools: Sequence[Tool]
    ) -> AnswerForm | None:
        form = self.engine.parts.text.answer_form(
            prompt, [_shown(tool) for tool in tools], **self._template_options(request)
        )
        if form is None or not request.has_thoughts_in_text:
            return form
        return replace(form, tells_thought=False)

    def _template_options(self, request: ChatRequest) -> dict[str, Any]:
        named = {
            "template_kwargs": request.template_kwargs or None,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.goes_on,
            "reasoning": request.thinking or self._options.reasoning,
        }
        return {name: value for name, value in named.items() if value is not None}

    def _require_read(self, request: ChatRequest) -> None:
        """Raises ApiError for a variable that the chat template does not read, where its value asks
        for something."""
        asked = request.required_kwargs
        unread = sorted(asked - self.engine.parts.text.template_variables) if asked else ()
        for name in unread:
            field = name if name in ChatRequest.model_fields else "chat_template_kwargs"
            field = request.shown_as.get(field, field)
            raise ApiError(
                400,
                f"{field} gives this model's chat template {name}, which it does not read: leave "
                "it out, or ask for another model.",
                param=field,
            )

    def _takes_several(self, request: ChatRequest) -> bool:
        """Tells whether an answer may have several calls. Models that were not trained to call
        tools repeat the first one: they have to be asked for several."""
        if isinstance(request.tool_choice, NamedTool):
            return False
        if request.parallel_tool_calls is None:
            return self.engine.parts.text.knows_tools
        return request.parallel_tool_calls

    def _prompts(self, prompt: Any) -> list[Sequence[int]]:
        encode = self.engine.encode
        if isinstance(prompt, str):
            return [encode(prompt)]
        if isinstance(prompt[0], int):
            return [prompt]
        return [encode(each) if isinstance(each, str) else each for each in prompt]

    def _usual_limit(self, form: AnswerForm | None) -> int | None:
        options = self._options
        if options.max_tokens is None:
            return None
        return answer_tokens(form, options.max_tokens, options.thought_tokens)

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
        limit = request.limit or self._usual_limit(form)
        asked: dict[str, Any] = {
            "max_tokens": None if limit == NO_LIMIT else limit,
            "stop": request.stops,
            "stop_token_ids": request.stop_token_ids,
            "prediction": request.prediction and request.prediction.text,
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
        given = {
            name: getattr(request, name) for name in _SAMPLING if getattr(request, name) is not None
        }
        if given.get("top_k") == -1:
            given["top_k"] = 0
        seed = request.seed_of(choice)
        if seed is not None:
            given["seed"] = seed
        biases = {int(id): bias for id, bias in (request.logit_bias or {}).items()}
        if request.ignore_eos:
            biases |= dict.fromkeys(self.engine.parts.text.eos_ids, -inf)
        if biases:
            given["logit_bias"] = biases
        params = SamplingParams(**{**vars(self._options.sampling), **given})
        self._require_whole_history(request, params)
        return params

    def _require_whole_history(self, request: AnswerRequest, params: SamplingParams) -> None:
        """Raises ApiError for penalties that are to look at the last tokens alone."""
        last = request.repeat_last_n
        if not params.penalized or last in (None, -1) or last >= self.engine.context_length:
            return
        raise ApiError(
            400,
            f"repeat_last_n is {last}, but penalties are of all tokens: leave it out or send -1.",
            param="repeat_last_n",
        )


def _refuse_calls(choice: Choice | None) -> None:
    """Raises ApiError for calls that are asked for where there are no tools."""
    if choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a call: send tools, too.", param="tool_choice")


def _is_required(choice: Choice | None) -> bool:
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice in ("required", "any") or isinstance(choice, NamedTool)


def _callable(choice: Choice | None, tools: Sequence[Tool]) -> list[dict[str, Any]]:
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


def _json_grammar(request: ChatRequest) -> Grammar | None:
    """Returns what an answer without calls is held to where there are tools. Raises ApiError for
    what is no JSON."""
    form = request.form
    if form is not None and not form.is_json:
        raise ApiError(
            400,
            f"{form.field} does not go with tools: send a JSON Schema, or no tools.",
            param=form.field.partition(".")[0],
        )
    return _grammar(request)


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


def _shown(tool: Tool) -> dict[str, Any]:
    """The tool as the model reads of it."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _dump(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)
