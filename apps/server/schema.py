"""The fields of requests. What would change the answer is honoured, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Json, model_validator

from edge_spec import Grammar, SamplingParams
from edge_spec.apps.server.body import (
    ALSO,
    HARMLESS,
    MAX_INT,
    MAX_TOOLS,
    Body,
    Choice,
    Content,
    JsonObject,
    Tool,
    ToolCall,
    Whole,
    joined,
)
from edge_spec.apps.server.errors import refused
from edge_spec.core.sampling import LEAST_PENALTY
from edge_spec.text.parts.answer_form import SWITCHES

NO_LIMIT = -1  # of the tokens of an answer


@dataclass(frozen=True)
class Gap:
    """Texts to write between. options: further ones of `Engine.infill_prompt`."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a body asks for, where each API says it in its own way; its other fields are `body`'s.

    Without messages, prompts and gap, a model is only to be opened. messages: as chat templates
    read them; messages_field: what the body calls them. tools: in OpenAI's form. tool_name: the one
    tool to call. prompt_options: for `Engine.chat_prompt`. form: of the answer, with the field that
    asks for it. logprobs: the number of alternatives.
    """

    body: Any  # an AnswerBody
    messages: Sequence[Mapping[str, Any]] = ()
    messages_field: str = "messages"
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[str | Sequence[int]] = ()
    gap: Gap | None = None
    form: tuple[str, Grammar] | None = None
    max_tokens: int | None = None  # None: the server's own default
    logprobs: int | None = None
    limit_s: float = 0  # of writing, from the first token on; 0: the server's own
    thoughts: Literal["told", "hidden", "in text"] = "told"

    @property
    def tells_thoughts(self) -> bool:
        """Return whether the answer has its thoughts beside the text."""
        return self.thoughts != "hidden"


Schema = JsonObject | Json[JsonObject]  # or a text, as vLLM and SGLang take it
Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Pattern], Field(min_length=1)]


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object, or, as llama.cpp and llama-cpp-python have it, one of a schema."""

    type: Literal["json_object"]
    given: Schema | None = Field(None, alias="schema")


class SchemaFormat(Body):
    """strict: where it is false, keywords that cannot be held are passed over."""

    harmless = frozenset(("name", "description"))
    type: Literal["json_schema"]
    given: Schema = Field(alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_flat(cls, given: Any) -> Any:
        """Reads OpenAI's older form, where all but the type stands in json_schema."""
        wrapped = given.get("json_schema") if isinstance(given, dict) else None
        return {**given, "json_schema": None, **wrapped} if isinstance(wrapped, dict) else given


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def grammar_of(format: ResponseFormat | None) -> Grammar | None:
    if format is None or isinstance(format, TextFormat):
        return None
    strict = isinstance(format, ObjectFormat) or format.strict is not False
    return Grammar.json_schema(format.given or None, strict=strict)


def _thinks(value: Any) -> Any:
    """Reads what makers of models send for it: a switch, or an object with a type."""
    if isinstance(value, dict) and list(value) == ["type"]:
        return {"enabled": True, "disabled": False}.get(str(value["type"]), value)
    return value


Effort = Annotated[str, Field(pattern=r"^[a-zA-Z_-]{1,20}$")]  # models know different words
Budget = Annotated[Whole, Field(ge=-1, le=MAX_INT)]  # of tokens; -1: no limit


class Reasoning(Body):
    """OpenRouter's, and OpenAI's, whose summary is the thought itself."""

    harmless = frozenset(("summary",))
    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


MAX_CHOICES = 16
_SAMPLING = [each.name for each in fields(SamplingParams) if each.name != "seed"]
MAX_STOPS = 256


def _is_limit(value: int) -> int:
    if not value:
        raise ValueError(f"{value} should be from 1 to {MAX_INT}, or -1 for no limit")
    return value


Limit = Annotated[Whole, Field(ge=-2, le=MAX_INT), AfterValidator(_is_limit)]
Alternatives = Annotated[Whole, Field(ge=0, le=20)]
Stop = Annotated[str, Field(max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_INT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biased = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Biases = dict[Biased, Bias]


class Speculative(Body):
    """drafter: None is the server's own. tokens: tell where each token came from."""

    drafter: Annotated[str, Field(max_length=200)] | None = None
    tokens: bool = False


class StreamOptions(Body):
    harmless = frozenset(("include_obfuscation", "continuous_usage_stats"))
    include_usage: bool | None = False


class Prediction(Body):
    """What most of the answer is expected to be, such as a file before a small change."""

    type: Literal["content"]
    content: Content


class AnswerBody(Body):
    """The fields of every request for an answer."""

    also = ALSO
    harmless = HARMLESS
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None  # -1 and 0: all tokens
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=10)] | None = None
    logit_bias: Biases | None = None
    max_completion_tokens: Limit | None = None  # goes before max_tokens, its older name
    max_tokens: Limit | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None  # -1: a fresh one
    stop: Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_probs: Alternatives | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    guided_choice: Choices | None = None
    grammar: str | None = None

    def request(self) -> Request:
        limit = self.max_completion_tokens or self.max_tokens
        forms = [(name, form) for name, form in self.forms().items() if form is not None]
        if len(forms) > 1:
            raise refused(forms[1][0], f"is a form beside that of {forms[0][0]}: send one of them.")
        return Request(
            body=self,
            form=forms[0] if forms else None,
            max_tokens=limit and max(limit, NO_LIMIT),  # llama.cpp has a -2, too
            logprobs=self.n_probs or None,
        )

    @property
    def speculation(self) -> Speculative:
        return self.speculative or Speculative()

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def tells_usage(self) -> bool:
        """True if a stream ends with an event of its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> dict[str, Any]:
        """Return further options of `Engine.generate`."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return {
            "stop": tuple(filter(None, stops)),
            "stop_token_ids": self.stop_token_ids,
            "prediction": joined(self.prediction.content) if self.prediction else None,
        }

    def sampling(self) -> dict[str, Any]:
        """Return the given sampling parameters, by their names in SamplingParams."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given["top_k"] = self.top_k and max(self.top_k, 0)
        biases = {int(id): bias for id, bias in (self.logit_bias or {}).items()}
        given["logit_bias"] = biases or None
        return {name: value for name, value in given.items() if value is not None}

    def forms(self) -> dict[str, Grammar | None]:
        """Return what an answer has to look like, by the fields that may ask for it."""
        schema, choices = self.json_schema, map(json.dumps, self.guided_choice or ())
        return {
            "response_format": grammar_of(self.response_format),
            "json_schema": None if schema is None else Grammar.json_schema(schema or None),
            "regex": Grammar.regex(self.regex) if self.regex else None,
            "guided_choice": Grammar.lark(f"start: {' | '.join(choices)}")
            if self.guided_choice
            else None,
            "grammar": Grammar.gbnf(self.grammar) if self.grammar else None,
        }


def prompt_options(
    kwargs: JsonObject, thinks: bool | None, effort: str | None, budget: int | None, **others: Any
) -> dict[str, Any]:
    """Return the options of `Engine.chat_prompt` that a request sets. kwargs: the client's template
    variables. others: further options. Raises ApiError."""
    for name in ("messages", "tools"):
        if name in kwargs:
            raise refused("chat_template_kwargs", f"has {name}: send them beside it.")
    # Some templates know the switch by another name, and some think when they are asked alone.
    is_on = thinks or (thinks is None and effort not in (None, "none", "minimal"))
    given: JsonObject = {**(dict.fromkeys(SWITCHES, True) if is_on else {}), **kwargs}
    if effort == "none":
        thinks = False
    elif effort is not None:
        given["reasoning_effort"] = effort
    if thinks is not None:
        given["enable_thinking"] = thinks
    if twice := [name for name in kwargs if given[name] != kwargs[name]]:
        told = f"has another {twice[0]} than the request: send one of them."
        raise refused("chat_template_kwargs", told)
    switches = [given.get(name) for name in SWITCHES]
    reasoning: Literal["auto", "off"] | int | None = "auto"
    if effort == "none" or budget == 0 or any(each is False for each in switches):
        reasoning = "off"
    elif budget not in (None, -1):
        reasoning = budget
    elif budget is None and effort is None and switches == [None, None]:
        reasoning = None
    asked = {"template_kwargs": given or None, "reasoning": reasoning, **others}
    return {name: value for name, value in asked.items() if value is not None}


class ConversationBody(AnswerBody):
    """Asks for the next message of a conversation, which each API writes in its own way."""

    logprobs: bool | None = False
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    documents: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: Annotated[bool, BeforeValidator(_thinks)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    reasoning_budget: Budget | None = None
    reasoning_format: (
        Literal["auto", "deepseek", "deepseek-legacy", "parsed", "hidden", "none", "raw"] | None
    ) = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def request(self) -> Request:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs: true.")
        if self.continue_final_message and self.add_generation_prompt:
            told = "goes on with a message, add_generation_prompt begins one: send one of them."
            raise refused("continue_final_message", told)
        scored, choice = max(self.top_logprobs or 0, self.n_probs or 0), self.tool_choice
        name = choice.function.name if isinstance(choice, ToolCall) else None
        if isinstance(choice, ToolCall) or choice == "any":
            choice = "required"
        return replace(
            super().request(),
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice=choice or "auto",
            tool_name=name,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=scored if self.logprobs or scored else None,
            thoughts=self._thoughts(),
            prompt_options=self._prompt_options(),
        )

    def _goes_on(self) -> bool | None:
        """Return whether the answer goes on with the last message."""
        return self.continue_final_message

    def _prompt_options(self) -> dict[str, Any]:
        reasoning, kwargs = self.reasoning or Reasoning(), dict(self.chat_template_kwargs or {})
        if self.documents:
            kwargs["documents"] = list(self.documents)
        return prompt_options(
            kwargs,
            reasoning.enabled if self.enable_thinking is None else self.enable_thinking,
            self.reasoning_effort or reasoning.effort,
            reasoning.max_tokens if self.reasoning_budget is None else self.reasoning_budget,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self._goes_on(),
        )

    def _thoughts(self) -> Literal["told", "hidden", "in text"]:
        if self.reasoning_format in ("none", "raw") or self.separate_reasoning is False:
            return "in text"
        hidden = self.reasoning_format == "hidden" or self.include_reasoning is False
        excluded = self.reasoning is not None and self.reasoning.exclude
        return "hidden" if hidden or excluded else "told"
