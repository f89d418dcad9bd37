"""The form that a request asks its answer to have: JSON, a choice, a regular expression or a
grammar, in the words of OpenAI, llama.cpp, llama-cpp-python, vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from edge_spec import Grammar
from edge_spec.apps.server.body import Body, JsonObject
from edge_spec.apps.server.field_names import OtherNames, refusal
from edge_spec.apps.validation import by_kind

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

    other_names = OtherNames(also={"value": "schema"})
    type: Literal["json_object", "json"]
    given: Schema | None = Field(None, alias="schema")


class JsonSchema(Body):
    """strict: where it is false, keywords that cannot be held are passed over."""

    other_names = OtherNames(harmless=frozenset(("name", "description")))
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


class RegexFormat(Body):
    other_names = OtherNames(also={"regex": "pattern", "value": "pattern"})
    type: Literal["regex"]
    pattern: Pattern


class GrammarFormat(Body):
    type: Literal["grammar"]
    grammar: Pattern


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[GrammarFormat, Tag("<grammar>")],
    by_kind(
        f'{{"type": "text"}}, {{"type": "json_object"}} or {_WRITTEN}',
        {},
        {
            "text": "<text>",
            "json_object": "<json_object>",
            "json": "<json_object>",
            "json_schema": "<json_schema>",
            "regex": "<regex>",
            "grammar": "<grammar>",
        },
    ),
]


class StructuredOutputs(Body):
    """vLLM's."""

    other_names = OtherNames(
        harmless=frozenset(("disable_fallback", "disable_any_whitespace", "backend"))
    )
    json_schema: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None

    def forms(self) -> Iterator[AskedForm]:
        where = "structured_outputs"
        if self.json_schema is not None:
            yield AskedForm.json(f"{where}.json", self.json_schema)
        if self.json_object:
            yield AskedForm.json(f"{where}.json_object", None)
        yield from _texts(where + ".", self.regex, self.choice, self.grammar)


class FormRequest(Body):
    """The fields of a request that say it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
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
        if self.structured_outputs is not None:
            yield from self.structured_outputs.forms()
        if self.json_schema is not None:
            yield AskedForm.json("json_schema", self.json_schema)
        yield from _texts("", self.regex, self.guided_choice, self.grammar)


def asked_format(field: str, format: ResponseFormat | None) -> Iterator[AskedForm]:
    if isinstance(format, SchemaFormat):
        asked = format.json_schema
        yield AskedForm.json(field, asked.given, is_strict=asked.strict)
    elif isinstance(format, ObjectFormat):
        yield AskedForm.json(field, format.given)
    elif isinstance(format, RegexFormat):
        yield AskedForm(field, Grammar.regex(format.pattern))
    elif isinstance(format, GrammarFormat):
        yield AskedForm(field, Grammar.gbnf(format.grammar))


def _texts(
    where: str, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Iterator[AskedForm]:
    """where: before the fields' names."""
    if regex:
        yield AskedForm(f"{where}regex", Grammar.regex(regex))
    if choice:
        texts = " | ".join(json.dumps(each) for each in choice)
        yield AskedForm(f"{where}choice", Grammar.lark(f"start: {texts}"))
    if grammar:
        yield AskedForm(f"{where}grammar", Grammar.gbnf(grammar))
