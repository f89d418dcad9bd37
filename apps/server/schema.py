"""The fields of requests. What would change the answer is honoured, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Json,
    Tag,
    model_validator,
)

from edge_spec import Grammar
from edge_spec.apps.server.fields import (
    ALSO,
    HARMLESS,
    LEAVE_OUT,
    MAX_INT,
    OFF,
    Body,
    Count,
    JsonObject,
    Whole,
    refusal,
    whole,
)
from edge_spec.apps.server.messages import MAX_TOOLS, Choice, Content, Message, Tool
from edge_spec.core.sampling import LEAST_PENALTY
from edge_spec.text.parts.answer_form import SWITCHES


@dataclass(frozen=True)
class AskedForm:
    """What an answer has to look like."""

    field: str  # of the request
    grammar: Grammar
    is_json: bool = False


Schema = JsonObject | Json[JsonObject]  # or a text, as vLLM and SGLang take it
Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Pattern], Field(min_length=1)]


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object, or, as llama.cpp and llama-cpp-python have it, one of a schema."""

    type: Literal["json_object"]
    given: Schema | None = Field(None, alias="schema")


class JsonSchema(Body):
    """strict: where it is false, keywords that cannot be held are passed over."""

    harmless = frozenset(("name", "description"))
    given: Schema = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    """A schema that stands beside the type is the one that is meant."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _is_wrapped(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "schema" not in given or given.get("json_schema"):
            return given
        wrapped = {name: given[name] for name in given if name != "type"}
        return {"type": given.get("type"), "json_schema": wrapped}


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def asked_format(field: str, format: ResponseFormat | None) -> Iterator[AskedForm]:
    if isinstance(format, SchemaFormat):
        asked = format.json_schema
        grammar = Grammar.json_schema(asked.given or None, strict=asked.strict is not False)
        yield AskedForm(field, grammar, is_json=True)
    elif isinstance(format, ObjectFormat):
        yield AskedForm(field, Grammar.json_schema(format.given or None), is_json=True)


_OF_THOUGHTS = frozenset((*SWITCHES, "reasoning_effort"))  # in chat templates


def _thinks(value: Any) -> Any:
    """Reads what makers of models send for it: a switch, or an object with a type."""
    if isinstance(value, dict) and list(value) == ["type"]:
        return {"enabled": True, "disabled": False}.get(str(value["type"]), value)
    return value


Effort = Annotated[str, Field(pattern=r"^[a-zA-Z_-]{1,20}$")]  # models know different words
Budget = Annotated[Whole, Field(ge=-1, le=MAX_INT)]  # of tokens; -1: no limit


class Reasoning(Body):
    """OpenRouter's."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


MAX_CHOICES = 16
MAX_STOPS = 256
NO_LIMIT = -1  # of the tokens of an answer; -2 in llama.cpp, which tells the two apart
_SEEDS = 2**64


def _is_limit(value: int) -> int:
    if not value:
        raise ValueError(f"{value} should be from 1 to {MAX_INT}, or -1 for no limit")
    return value


def _scores(value: Any) -> Any:
    """Returns None for false, which asks for no scores as chat requests do."""
    return None if value is False else value


def _all_whole(value: Any) -> Any:
    """Reads a list at once: prompts are long."""
    is_plain = not isinstance(value, list) or float not in set(map(type, value))
    return value if is_plain else [whole(each) for each in value]


Limit = Annotated[Whole, Field(ge=-2, le=MAX_INT), AfterValidator(_is_limit)]
Alternatives = Annotated[Whole, Field(ge=0, le=20)]
Stop = Annotated[str, Field(max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_INT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biased = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Biases = dict[Biased, Bias]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1), BeforeValidator(_all_whole)
]


def _prompt_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else None
    return {str: "texts", list: "lists", int: "tokens", float: "tokens"}.get(type(first))


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[str], Field(max_length=MAX_CHOICES), Tag("texts")]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES), Tag("lists")],
    Discriminator(
        _prompt_tag,
        custom_error_type="no_prompt",
        custom_error_message="Input should be a text, token ids, or a list of one of them",
    ),
]


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


class AnswerRequest(Body):
    """The fields of every request for an answer. Other servers' names of them are understood,
    members that change no answer are taken, and any other is refused by name."""

    also = ALSO
    harmless = HARMLESS
    off = frozenset(OFF)
    has_origins: ClassVar[bool] = True  # of tokens, in answers of its API
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Limit | None = None  # goes before max_tokens, its older name
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None  # -1 and 0: all tokens
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=10)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    logit_bias: Biases | None = None
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

    @cached_property
    def form(self) -> AskedForm | None:
        return next(self._forms(), None)

    def _forms(self) -> Iterator[AskedForm]:
        yield from asked_format("response_format", self.response_format)
        if self.json_schema is not None:
            grammar = Grammar.json_schema(self.json_schema or None)
            yield AskedForm("json_schema", grammar, is_json=True)
        if self.regex:
            yield AskedForm("regex", Grammar.regex(self.regex))
        if self.guided_choice:
            texts = " | ".join(json.dumps(each) for each in self.guided_choice)
            yield AskedForm("guided_choice", Grammar.lark(f"start: {texts}"))
        if self.grammar:
            yield AskedForm("grammar", Grammar.gbnf(self.grammar))

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def asks_origins(self) -> bool:
        """Says whether the answer is to tell where each token came from."""
        return self.speculative is not None and self.speculative.tokens

    @property
    def limit(self) -> int | None:
        """Returns None where the request does not say, NO_LIMIT where it wants none."""
        given = self.max_completion_tokens or self.max_tokens
        return given if given is None else max(given, NO_LIMIT)

    @property
    def num_logprobs(self) -> int | None:
        """Returns how many alternatives are told beside each token; None: tokens are not scored."""
        return self.n_probs or None

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(stop for stop in given if stop)

    @model_validator(mode="after")
    def _asks_what_has_a_place(self) -> AnswerRequest:
        fields = [form.field for form in self._forms()]
        if len(fields) > 1:
            raise refusal(fields[1], f"is a form beside that of {fields[0]}: send one of them")
        if self.asks_origins and not self.has_origins:
            told = f"asks for what has no place in a message of this API: {LEAVE_OUT}"
            raise refusal("speculative", told)
        return self

    def given(self, kind: type[Body]) -> dict[str, Any]:
        """Returns those of its fields that were sent and that `kind` has, too, as JSON has them."""
        names = set(kind.model_fields)
        # Without warnings: members of unions are found by what a request has, not by what was read.
        return self.model_dump(include=names, exclude_unset=True, by_alias=True, warnings=False)

    def seed_of(self, choice: int) -> int | None:
        """Choices with the same seed would be the same."""
        return None if self.seed in (None, -1) else (self.seed + choice) % _SEEDS


class ChatRequest(AnswerRequest):
    """Asks for the assistant's next message."""

    shown_as: ClassVar[Mapping[str, str]] = {}  # other APIs' names of fields, for refusals
    messages: Annotated[list[Message], Field(min_length=1)]
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

    @property
    def goes_on(self) -> bool | None:
        """Says whether the answer goes on with the last message."""
        return self.continue_final_message or self.messages[-1].prefix

    @property
    def num_logprobs(self) -> int | None:
        num_asked = max(self.top_logprobs or 0, self.n_probs or 0)
        return num_asked if self.logprobs or num_asked else None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning or Reasoning()).effort

    @property
    def thinking(self) -> Literal["auto", "off"] | int | None:
        """Returns what engines are asked for, as `edge_spec.text.parts.answer_form.Reasoning` has
        it; None where the request says nothing of it."""
        budget, switches = self.reasoning_budget, self.template_kwargs
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        on = [switches.get(name) for name in SWITCHES]
        if self.effort == "none" or budget == 0 or any(each is False for each in on):
            return "off"
        if budget not in (None, -1):
            return budget
        return None if budget is None and self.effort is None and on == [None, None] else "auto"

    @property
    def tells_thoughts(self) -> bool:
        """Says whether the answer has its thoughts beside the text."""
        hidden = self.reasoning_format == "hidden" or self.include_reasoning is False
        return not (hidden or (self.reasoning is not None and self.reasoning.exclude))

    @property
    def has_thoughts_in_text(self) -> bool:
        return self.reasoning_format in ("none", "raw") or self.separate_reasoning is False

    @property
    def template_kwargs(self) -> JsonObject:
        """Returns what the chat template is given by name."""
        effort, thinks = self.effort, self.enable_thinking
        if thinks is None and self.reasoning is not None:
            thinks = self.reasoning.enabled
        # Some templates know the switch by another name, and some think when they are asked alone.
        is_on = thinks or (thinks is None and effort not in (None, "none", "minimal"))
        on: JsonObject = dict.fromkeys(SWITCHES, True) if is_on else {}
        named: JsonObject = {
            "enable_thinking": False if effort == "none" else thinks,
            "reasoning_effort": None if effort == "none" else effort,
            "documents": list(self.documents or ()) or None,
        }
        given = {name: value for name, value in named.items() if value is not None}
        return {**on, **(self.chat_template_kwargs or {}), **given}

    @property
    def required_kwargs(self) -> set[str]:
        """Returns the names of those that a template has to read: what is said of thoughts is of
        none where the model has none."""
        given = self.template_kwargs.items()
        return {name for name, value in given if value and name not in _OF_THOUGHTS}

    @model_validator(mode="before")
    @classmethod
    def _has_budget(cls, given: Any) -> Any:
        """Reads a budget that stands beside the switch, as Anthropic's API has it."""
        asked = given.get("thinking") if isinstance(given, dict) else None
        if isinstance(asked, dict) and list(asked) == ["type", "budget_tokens"]:
            budget = asked["budget_tokens"]
            return {**given, "thinking": {"type": asked["type"]}, "reasoning_budget": budget}
        return given

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            told = "goes on with a message, add_generation_prompt begins one: send one of them"
            raise refusal("continue_final_message", told)
        kwargs, given = self.chat_template_kwargs or {}, self.template_kwargs
        for name, value in kwargs.items():
            if name in ("messages", "tools"):
                raise refusal("chat_template_kwargs", f"has {name}: send them beside it")
            if given[name] != value:
                told = f"has another {name} than the request: send one of them"
                raise refusal("chat_template_kwargs", told)
        return self


class CompletionRequest(AnswerRequest):
    """Asks for the continuation of a text."""

    prompt: Prompt
    logprobs: Annotated[Alternatives | None, BeforeValidator(_scores)] = None
    best_of: Count | None = None
    echo: bool | None = False
    suffix: str | None = None  # what follows the answer; "": nothing is known of it

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None:
            return self.n_probs or None
        return max(self.logprobs, self.n_probs or 0)

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise refusal("best_of", "is not supported, but where it is n: leave it out")
        if self.echo and self.num_logprobs is not None:
            raise refusal("echo", "goes without logprobs: the prompt's tokens are not scored")
        if self.suffix and self.echo:
            raise refusal("echo", "goes without suffix: the text is known on both sides")
        if self.suffix and not isinstance(self.prompt, str):
            raise refusal("suffix", "needs a prompt that is one text")
        return self
