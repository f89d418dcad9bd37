"""What a request says of the form of its answer and of the thoughts before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from edge_spec import Grammar
from edge_spec.apps.server.fields import MAX_INT, Body, JsonObject, Whole, refusal
from edge_spec.apps.validation import by_kind
from edge_spec.text.parts.thought_forms import SWITCHES

_WRITTEN = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'


@dataclass(frozen=True)
class AskedForm:
    """What an answer has to look like."""

    field: str  # of the request
    grammar: Grammar
    is_json: bool = False

    @staticmethod
    def json(
        field: str, schema: Mapping[str, Any] | None, *, is_strict: bool | None = True
    ) -> AskedForm:
        """Any object where the schema says nothing."""
        grammar = Grammar.json_schema(schema or None, strict=is_strict is not False)
        return AskedForm(field, grammar, is_json=True)


def _from_text(schema: Any) -> Any:
    """Reads a schema that is JSON in a text, as vLLM and SGLang take it."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise ValueError("this is no JSON Schema; send an object") from None


Schema = Annotated[JsonObject, BeforeValidator(_from_text, json_schema_input_type=JsonObject | str)]
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

    @model_validator(mode="before")
    @classmethod
    def _has_schema(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("schema") is None:
            raise refusal("schema", f"is missing; send {_WRITTEN}")
        return given


class SchemaFormat(Body):
    """A schema that stands beside the type is the one that is meant."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _is_wrapped(cls, given: Any) -> Any:
        if isinstance(given, dict) and "schema" in given and given.get("json_schema") is None:
            others = {name: value for name, value in given.items() if name != "json_schema"}
            names = ("schema", "name", "description", "strict")
            wrapped = {name: others.pop(name) for name in names if name in others}
            return {**others, "json_schema": wrapped}
        if isinstance(given, dict) and given.get("json_schema") is None:
            raise refusal("json_schema", f"is missing; send {_WRITTEN}")
        return given


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_kind(
        f'{{"type": "text"}}, {{"type": "json_object"}} or {_WRITTEN}; '
        "regex and grammar are fields of their own",
        {},
        {"text": "<text>", "json_object": "<json_object>", "json_schema": "<json_schema>"},
    ),
]


class FormRequest(Body):
    """The fields of a request that say it."""

    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    guided_choice: Choices | None = None
    grammar: str | None = None

    @cached_property
    def form(self) -> AskedForm | None:
        return next(self._forms(), None)

    @model_validator(mode="after")
    def _has_one_form(self) -> FormRequest:
        fields = [form.field for form in self._forms()]
        if len(fields) > 1:
            raise refusal(fields[1], f"is a form beside that of {fields[0]}: send one of them")
        return self

    def _forms(self) -> Iterator[AskedForm]:
        yield from asked_format("response_format", self.response_format)
        if self.json_schema is not None:
            yield AskedForm.json("json_schema", self.json_schema)
        if self.regex:
            yield AskedForm("regex", Grammar.regex(self.regex))
        if self.guided_choice:
            texts = " | ".join(json.dumps(each) for each in self.guided_choice)
            yield AskedForm("guided_choice", Grammar.lark(f"start: {texts}"))
        if self.grammar:
            yield AskedForm("grammar", Grammar.gbnf(self.grammar))


def asked_format(field: str, format: ResponseFormat | None) -> Iterator[AskedForm]:
    if isinstance(format, SchemaFormat):
        asked = format.json_schema
        yield AskedForm.json(field, asked.given, is_strict=asked.strict)
    elif isinstance(format, ObjectFormat):
        yield AskedForm.json(field, format.given)


_NAMES = frozenset((*SWITCHES, "reasoning_effort"))  # in chat templates
_IN_TEXT = ("none", "raw")  # formats that leave thoughts where the model wrote them


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


class ReasoningRequest(Body):
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
    def thinking(self) -> Literal["auto", "off"] | int | None:
        """Returns what engines are asked for: see `edge_spec.text.thoughts.Reasoning`. None where
        the request says nothing of it."""
        reasoning, switches = self.reasoning or Reasoning(), self.template_kwargs
        budget = reasoning.max_tokens if self.reasoning_budget is None else self.reasoning_budget
        effort = self.reasoning_effort or reasoning.effort
        on = [switches.get(name) for name in SWITCHES]
        if effort == "none" or budget == 0 or any(each is False for each in on):
            return "off"
        if budget not in (None, -1):
            return budget
        return None if budget is None and effort is None and on == [None, None] else "auto"

    @property
    def tells_thoughts(self) -> bool:
        """Says whether the answer has its thoughts beside the text."""
        hidden = self.reasoning_format == "hidden" or self.include_reasoning is False
        return not (hidden or (self.reasoning is not None and self.reasoning.exclude))

    @property
    def has_thoughts_in_text(self) -> bool:
        return self.reasoning_format in _IN_TEXT or self.separate_reasoning is False

    @property
    def template_kwargs(self) -> JsonObject:
        """Returns what the chat template is given by name."""
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        thinks = reasoning.enabled if self.enable_thinking is None else self.enable_thinking
        named: JsonObject = {"enable_thinking": thinks}
        if effort == "none":
            named["enable_thinking"] = False
        else:
            named["reasoning_effort"] = effort
        given = {name: value for name, value in named.items() if value is not None}
        # Some templates know the switch by another name, and some think when they are asked alone.
        is_on = thinks or (thinks is None and effort not in (None, "none", "minimal"))
        on: JsonObject = dict.fromkeys(SWITCHES, True) if is_on else {}
        return {**on, **(self.chat_template_kwargs or {}), **given}

    @property
    def required_kwargs(self) -> set[str]:
        """Returns the names of those that a template has to read: what is said of thoughts is of
        none where the model has none."""
        given = self.template_kwargs.items()
        return {name for name, value in given if value and name not in _NAMES}

    @model_validator(mode="before")
    @classmethod
    def _has_budget(cls, given: Any) -> Any:
        """Reads a budget that stands beside the switch, as Anthropic's API has it."""
        asked = given.get("thinking") if isinstance(given, dict) else None
        if isinstance(asked, dict) and list(asked) == ["type", "budget_tokens"]:
            budget = asked["budget_tokens"]
            return {**given, "thinking": {"type": asked["type"]}, "reasoning_budget": budget}
        return given
