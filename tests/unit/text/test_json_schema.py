"""JSON Schemas as people's tools write them: what is held, passed over and refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar
from edge_spec.text.json_schema import held_schema
from fixtures.form_walks import fits, walked


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
CAT = _object({"kind": {"const": "cat"}, "meows": INTEGER}, "kind", "meows")
DOG = _object({"kind": {"const": "dog"}, "barks": INTEGER}, "kind", "barks")
LIST = _object({"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/L"}, NULL]}}, "v", "next")
PETS = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "$defs": {"Cat": CAT, "Dog": DOG},
}
# As zod-to-json-schema writes it, and zod itself.
ZOD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/user",
    "definitions": {
        "user": _object(
            {
                "id": {"type": "string", "format": "uuid"},
                "role": {"type": "string", "enum": ["admin", "user"]},
                "age": {"type": ["integer", "null"], "exclusiveMinimum": 0},
                "pair": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 2,
                    "items": [STRING, {"type": "number"}],
                },
                "tags": {"type": "object", "additionalProperties": STRING},
                "same": {"$ref": "#/definitions/user/properties/role"},
                "none": {"not": {}},
                "both": {"anyOf": [{"not": {}}, STRING]},
                "friend": {"$ref": "#/definitions/user"},
            },
            *("id", "role", "pair"),
            additionalProperties=False,
        )
    },
}
PREFIXED = {
    "type": "object",
    "properties": {"x_a": {"minimum": 3}},
    "patternProperties": {"^x_": INTEGER},
    "additionalProperties": NULL,
}

# What fits, and what does not.
HELD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "oneOf of references": (
        PETS,
        [{"kind": "cat", "meows": 3}, {"kind": "dog", "barks": 1}],
        [{"kind": "cat", "barks": 3}, {"kind": "cat", "meows": 3, "x": 1}],
    ),
    "recursion": (
        {"$ref": "#/$defs/L", "$defs": {"L": LIST}},
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}, {"v": 1, "next": 3}],
    ),
    "a reference beside keywords": (
        _object(
            {"a": {"$ref": "#/$defs/N", "maximum": 5, "description": "d", "nullable": False}},
            **{"$defs": {"N": {**INTEGER, "minimum": 3}}},
        ),
        [{"a": 4}],
        [{"a": 2}, {"a": 6}],
    ),
    "a pointer with escapes": (
        {
            "$ref": "#/definitions/A%20b/properties/x~1y",
            "definitions": {"A b": {"properties": {"x/y": INTEGER}}},
        },
        [3],
        ["x"],
    ),
    "a member named $ref": (_object({"$ref": INTEGER}, "$ref"), [{"$ref": 1}], [{"$ref": ""}]),
    "control characters": ({"enum": ["a\0b", "ab\n"]}, ["ab\n"], ["ab"]),
    "values of all types": (
        {"enum": [1, "1", None, True, 1.5, {"a": [1]}, [1, "x"]]},
        [1, "1", None, True, 1.5, {"a": [1]}, [1, "x"]],
        [False, 2, "2", {}, {"a": []}, [1], 0],
    ),
    "a const object": ({"const": {"a": {"b": None}}}, [{"a": {"b": None}}], [{"a": {}}]),
    "type and enum": ({"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    "nullable": ({"type": "string", "nullable": True, "example": 3}, [None, ""], [3]),
    "nullable reference": (
        {"$ref": "#/$defs/N", "nullable": True, "$defs": {"N": INTEGER}},
        [None, 3],
        [""],
    ),
    "a list of types": ({"type": ["string", "null"], "maxLength": 1}, ["", None], ["ab", 1]),
    "keywords of other types": ({"minimum": 3, "minLength": 2}, [3, "ab", None, {}], [2, "a"]),
    "exclusive bounds": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        [0.25, 0.01],
        [0, 0.5, 0.0],
    ),
    "exclusive bounds of draft 4": (
        {**INTEGER, "$schema": "http://json-schema.org/draft-04/schema#"}
        | {"minimum": 0, "exclusiveMinimum": True, "maximum": 3},
        [1, 3],
        [0, 4],
    ),
    "bounds below zero": (
        {"type": "number", "minimum": -3.5, "exclusiveMaximum": -3},
        [-3.5, -3.25],
        [-3, -4, 3.25],
    ),
    "whole bounds": ({**INTEGER, "minimum": 0.5, "maximum": 2.5}, [1, 2], [0, 3, 1.5]),
    "multiples": ({"type": "number", "multipleOf": 0.25}, [0.25, 1, -0.75], [0.3]),
    "whole multiples": ({**INTEGER, "multipleOf": 1.5}, [3, 0, -6], [1, 2, 4]),
    "formats of numbers": ({**INTEGER, "format": "uint8"}, [0, 255], [-1, 256]),
    "lengths": ({"type": "string", "minLength": 2.0, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
    "a pattern anywhere": ({"type": "string", "pattern": "ab"}, ["ab", "xaby"], ["a b"]),
    "a pattern and a length": (
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 2},
        ["a", "ab"],
        ["", "abc", "A"],
    ),
    "a pattern and values": (
        {"enum": ["a1", "b", "c2"], "pattern": "[0-9]$"},
        ["a1", "c2"],
        ["b"],
    ),
    "dates that exist": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "2023-12-31"],
        ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"],
    ),
    "a tuple": (
        {"prefixItems": [INTEGER, STRING], "items": False, "minItems": 2, "type": "array"},
        [[1, ""]],
        [[1], [1, "", 2], ["", 1]],
    ),
    "a tuple of draft 7": (
        {"type": "array", "items": [INTEGER], "additionalItems": NULL, "maxItems": 2}
        | {"$schema": "http://json-schema.org/draft-07/schema#"},
        [[], [1], [1, None]],
        [[""], [1, 2], [1, None, None]],
    ),
    "members are those that are named": (
        _object({"a": INTEGER}, "a"),
        [{"a": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "other members": (
        _object({"a": INTEGER}, additionalProperties=STRING),
        [{"a": 1, "b": ""}, {"b": ""}],
        [{"a": ""}, {"b": 1}],
    ),
    "patterns of members": (
        PREFIXED,
        [{"x_a": 3, "x_b": 1, "y": None}],
        [{"x_a": 1}, {"x_b": ""}, {"y": 1}],
    ),
    "names that are listed": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": ""}],
    ),
    "names of any text": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        [{"ab": 1}],
        [{"ab": ""}],
    ),
    "allOf": (
        {"allOf": [_object({"a": INTEGER}, "a"), _object({"b": STRING}, "b")]},
        [{"a": 1, "b": ""}],
        [{"a": 1}, {"b": ""}],
    ),
    "keywords of null": (
        _object({"a": {**INTEGER, "enum": None, "minimum": None}}, additionalProperties=None),
        [{"a": 1}],
        [{"a": ""}],
    ),
    "zod": (
        ZOD,
        [{"id": "01234567-89ab-cdef-0123-456789abcdef", "role": "user", "pair": ["", 1.5]}],
        [{"role": "user", "pair": ["", 1.5]}, {"id": "x", "role": "user", "pair": ["", 1.5]}],
    ),
    "oneOf of values": ({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}]}, ["a", "c"], ["d"]),
    "a union beside members": (
        _object({"a": INTEGER}, "a", anyOf=[_object({"b": NULL}, "b"), _object({"c": NULL})]),
        [{"a": 1, "b": None}, {"a": 1}, {"a": 1, "c": None}, {"a": 1, "d": 1}],
        [{"b": None}],
    ),
    "a recursive union with tags": (
        {
            "$ref": "#/$defs/E",
            "$defs": {
                "E": {
                    "oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/S"}],
                    "discriminator": {"propertyName": "k"},
                },
                "N": _object({"k": {"const": "n"}, "v": INTEGER}, "v"),
                "S": _object({"k": {"const": "s"}, "of": {"$ref": "#/$defs/E"}}, "of"),
            },
        },
        [{"k": "s", "of": {"k": "n", "v": 1}}],
        [{"v": 1}, {"k": "n", "of": {"k": "n", "v": 1}}, {"k": "s", "of": {"v": 1}}],
    ),
    "arrays that fit both": (
        {
            "type": "array",
            "allOf": [
                {"items": {"minimum": 2}, "minItems": 1},
                {"prefixItems": [INTEGER], "items": STRING, "maxItems": 2},
            ],
        },
        [[2], [3, "x"]],
        [[], [1], ["x"], [3, "x", "x"]],
    ),
    "numbers that fit both": (
        {
            "allOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"maximum": 0.5},
                {"enum": [0, 0.5, 1]},
            ]
        },
        [0.5],
        [0, 1, 0.25],
    ),
    "members that fit both": (
        {"allOf": [_object({"a": INTEGER}, additionalProperties=NULL), _object({"b": {}}, "a")]},
        [{"a": 1, "b": None}],
        [{"a": 1, "b": 1}, {"b": None}, {"a": None}],
    ),
}


# What a validator of JSON Schema refuses, or reads in another way than OpenAPI does.
UNJUDGED = ("keywords of null", "nullable reference")


@pytest.mark.parametrize("name", HELD)
def test_it_is_held(name: str) -> None:
    schema, fitting, others = HELD[name]
    grammar = Grammar.json_schema(schema)
    judged = {"anyOf": [schema, NULL]} if name == "nullable" else schema  # a word of OpenAPI's
    judge = None if name in UNJUDGED else jsonschema_rs.validator_for(judged)
    for value in fitting:
        assert fits(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in others:
        assert not fits(grammar, json.dumps(value, ensure_ascii=False)), value
    for seed in range(4):
        text = walked(grammar, seed)
        if text is not None and judge is not None:
            assert judge.is_valid(json.loads(text)), text


def _in_a(schema: Any) -> Any:
    return _object({"a": schema}, "a")


# Each stands at the property a, of which messages name the keyword and its place. These are refused
# if strict, else passed over.
UNSOUND: dict[str, list[Any]] = {
    "type": [{"type": "objekt"}, {"type": []}],
    "properties": [{"properties": ["a"]}],
    "items": [{"items": 3}],
    "required": [{"required": "a"}, {"required": [1]}],
    "enum": [{"enum": "a"}, {"enum": [2**60]}],
    "anyOf": [{"anyOf": {}}],
    "minLength": [{"minLength": -1}, {"minLength": 10**6}],
    "minItems": [{"type": "array", "minItems": 10**9}],
    "minimum": [{"minimum": "3"}],
    "multipleOf": [{"multipleOf": n, "type": "number"} for n in (0, 0.07, 1_000_003, 0.123456789)],
    "$ref": [{"$ref": each} for each in ("#/$defs/none", "https://e.com/x", "#anchor", "other")],
    "pattern": [
        {"type": "string", "pattern": each}
        for each in ("^(?!a)", r"(a)\1", r"\bx", "a(b", "[a&&b]", "[a[b]", "[a--b]")
    ],
    "patternProperties": [{"patternProperties": {"(?=a)": True}}],
    "not": [{"type": "string", "not": {"pattern": "a"}}, {"not": STRING}],
    "if": [{"type": "object", "if": {}, "then": {"required": ["a"]}}],
    "propertyNames": [
        {"type": "object", "propertyNames": {"pattern": "a"}},
        _object({"a": NULL}, propertyNames={"maxLength": 2}),
    ],
    "contains": [{"type": "array", "contains": INTEGER, "maxContains": 2}],
    "dependentRequired": [{"type": "object", "dependentRequired": {"a": ["b"]}}],
    "dependentSchemas": [{"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}],
    "dependencies": [{"type": "object", "dependencies": {"a": ["b"]}}],
    "unevaluatedItems": [{"type": "array", "unevaluatedItems": False}],
    "unevaluatedProperties": [{"allOf": [_object({})], "unevaluatedProperties": False}],
    "$dynamicRef": [{"$dynamicRef": "#a"}],
    "minProperties": [_object({"a": NULL, "b": NULL}, minProperties=2)],
    "maxProperties": [_object({"a": NULL, "b": NULL}, maxProperties=1, additionalProperties=NULL)],
}


@pytest.mark.parametrize(
    ("keyword", "schema"), [(k, each) for k, some in UNSOUND.items() for each in some], ids=str
)
def test_what_cannot_be_held_is_refused_with_its_place_or_passed_over(
    keyword: str, schema: Any
) -> None:
    with pytest.raises(UsageError) as refused:
        fits(Grammar.json_schema(_in_a(schema)), "1")
    told = str(refused.value)
    assert f"{keyword} " in told and f" at #/properties/a/{keyword}" in told and "\n" not in told
    grammar = Grammar.json_schema(_in_a(schema), strict=False)
    assert any(f"{keyword} at #/properties/a/{keyword} (" in each for each in grammar.passed_over)
    assert any(walked(grammar, seed) for seed in range(4))


WRONG = [
    ({"properties": {"a": "string"}}, "not a string at #/properties/a"),
    ({"anyOf": [INTEGER, None]}, "not null at #/anyOf/1"),
    ({"allOf": [STRING, NULL]}, "Unsatisfiable"),
    ({"enum": []}, "Unsatisfiable"),
    (False, "Unsatisfiable"),
    (_object({"a": {"minimum": 3, "maximum": 2, **INTEGER}}, "a"), "Unsatisfiable"),
    ({"enum": ["\ud83d"]}, "unexpected end of hex escape"),
    (_in_a({"const": {"b": "\ud83d"}}), "unexpected end of hex escape"),
    (_object({"\ud83d": NULL}), "unexpected end of hex escape"),
    ({"enum": [float("nan")]}, "expected value"),
]


@pytest.mark.parametrize(("schema", "fault"), WRONG, ids=ascii)
@pytest.mark.parametrize("strict", [True, False])
def test_what_no_answer_can_be_is_refused(schema: Any, fault: str, strict: bool) -> None:
    with pytest.raises(UsageError, match=f"no answer can have this form.*({fault})"):
        fits(Grammar.json_schema(schema, strict=strict), "1")


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "string", "format": "color"}, ["format at #/format"]),
        ({"type": "array", "uniqueItems": True}, ["uniqueItems at #/uniqueItems"]),
        (_in_a({"oneOf": [STRING, NULL]}), ["oneOf at #/properties/a/oneOf"]),
        (_in_a({"maxLenght": 3}), ["maxLenght at #/properties/a/maxLenght"]),
        ({"type": "string", "contentSchema": {}}, ["contentSchema at #/contentSchema"]),
        ({"type": "object", "minProperties": 2}, ["minProperties at #/minProperties"]),
        ({"title": "t", "default": 1, "x-guidance": {}, "examples": [], "deprecated": True}, []),
        ({"type": "string", "format": "password", "contentEncoding": "base64"}, []),
        ({"type": "number", "format": "double"}, []),
    ],
)
def test_what_is_always_passed_over_is_told(
    schema: Any, places: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    grammar = Grammar.json_schema(schema)
    assert [each.partition(" (")[0] for each in grammar.passed_over] == places
    fits(grammar, "1")
    assert Grammar.regex("a").passed_over == ()
    assert len(caplog.records) <= 1


def _nested(levels: int, schema: Any) -> Any:
    for _ in range(levels):
        schema = _in_a(schema)
    return schema


def _chained(levels: int) -> Any:
    parts = {str(n): _object({"a": {"$ref": f"#/$defs/{n + 1}"}}) for n in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": {**parts, str(levels): STRING}}


HOSTILE: dict[str, Any] = {
    "levels": _nested(100, STRING),
    "values": {"enum": [f"value {n}" for n in range(30_000)]},
    "parts": _object({f"p{n}": STRING for n in range(30_000)}),
    "combinations": {
        "allOf": [
            {"anyOf": [{"required": [f"p{i}-{j}"]} for j in range(9)], "type": "object"}
            for i in range(9)
        ]
    },
    "levels of references": _chained(1000),
    "levels of values": {"const": json.loads("[" * 200 + "]" * 200)},
    "counts in a pattern": {"type": "string", "pattern": "a{1000000000}", "maxLength": 9},
    "patterns of members": {"patternProperties": {f"^{n}$": STRING for n in range(999)}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_be_too_large_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"no answer can have this form|cannot be held"):
        fits(Grammar.json_schema(HOSTILE[name]), "1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a|a)*((b+)+)+(.*c){50}$"},
        {"type": "array", "maxItems": 10**9, "items": {"type": "string", "maxLength": 10**9}},
        {"type": "object", "maxProperties": 10**9},
        {"type": "integer", "minimum": -(10**400), "maximum": 10**30},
        _nested(50, STRING),
        {"oneOf": [_object({"k": {"const": f"c{n}"}}, "k") for n in range(200)]},
        _chained(40),
        _object({"a" * 60 + "b": NULL}, patternProperties={"^(a|a)*$": STRING}),
        _object(
            {f"p{n}": {"allOf": [{"$ref": "#/$defs/big"}, {}]} for n in range(2000)},
            **{"$defs": {"big": _object({f"q{n}": STRING for n in range(2000)})}},
        ),
        {
            "$ref": "#/$defs/0",
            "$defs": {
                **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)},
                "40": STRING,
            },
        },
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_is_large_and_can_be_held_is_held(schema: Any) -> None:
    assert not fits(Grammar.json_schema(schema), "nothing")


class Step(BaseModel):
    explanation: str
    kind: str = Field(description="Which one.", default="plain")


class Steps(BaseModel):
    steps: list[Step] = Field(max_length=2)
    first: Step | None = Field(None, description="Beside a reference.")


def test_strict_schemas_of_openais_library_are_held() -> None:
    """They have additionalProperties: false everywhere, and all members are required."""
    tool: Any = openai.pydantic_function_tool(Steps)
    assert tool["function"]["strict"]
    schema = tool["function"]["parameters"]
    grammar = Grammar.json_schema(schema)
    for seed in range(6):
        text = walked(grammar, seed)
        if text is not None:
            Steps.model_validate_json(text)
            assert jsonschema_rs.is_valid(schema, json.loads(text))
    step = {"explanation": "e", "kind": "k"}
    assert fits(grammar, json.dumps({"steps": [step], "first": step}))
    assert not fits(grammar, json.dumps({"steps": []}))


@pytest.mark.parametrize(
    ("parameters", "fitting", "others"),
    [
        ({"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [1, "", {}, None]),
        ({"type": ["object", "null"], "properties": {"a": NULL}}, [{"a": None}], [None]),
        ({"anyOf": [STRING, CAT]}, [{"kind": "cat", "meows": 1}], [""]),
        ({"$ref": "#/$defs/C", "$defs": {"C": CAT}}, [{"kind": "cat", "meows": 1}], [1]),
        ({"type": "object", "properties": []}, [{}], [{"a": 1}]),  # of PHP
        (_in_a({"type": "str"}), [{"a": 1}], [{}, 3]),  # of Python
        (_in_a({**INTEGER, "required": True}), [{"a": 1}], [3]),  # of draft 3
        ({"properties": {"a": True}}, [{"a": [1]}], [{"b": 1}]),
    ],
    ids=str,
)
def test_arguments_of_a_call_are_an_object(
    parameters: Any, fitting: list[Any], others: list[Any]
) -> None:
    source = json.dumps(parameters)
    held = held_schema(source, is_strict=False, is_object=True, name="the parameters of f")
    grammar = Grammar.json_schema(held.schema)
    for value in fitting + others:
        assert fits(grammar, json.dumps(value)) == (value in fitting), value


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"type": "object", "not": {}}, "Unsatisfiable .* at the parameters of f"),
        (_in_a({"pattern": "(?=x)"}), "pattern at the parameters of f/properties/a/pattern"),
    ],
)
def test_a_tool_that_no_call_fits_is_refused_by_name(parameters: Any, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        held_schema(json.dumps(parameters), is_object=True, name="the parameters of f")
