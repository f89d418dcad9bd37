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
from edge_spec.text.tools.formats import GENERIC
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
UNTAGGED = _object({"kind": STRING, "meows": INTEGER}, "meows")
MAPPED = {
    "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
    "discriminator": {
        "propertyName": "kind",
        "mapping": {"c": "#/components/schemas/Cat", "d": "#/components/schemas/Dog"},
    },
    "components": {"schemas": {"Cat": UNTAGGED, "Dog": UNTAGGED}},
}
KINDS = _object({"k": {"enum": ["a", "b", "c"]}, "x": INTEGER, "y": INTEGER}, "k")
CHOICE = {
    **KINDS,
    "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
    "then": {"required": ["x"]},
    "else": {"required": ["y"]},
}
TREES = {
    "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "$defs": {
        "a": _object({"child": {"$ref": "#/$defs/a"}, "x": INTEGER}),
        "b": _object({"child": {"$ref": "#/$defs/b"}, "y": STRING}),
    },
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
    "discriminator without const": (
        MAPPED,
        [{"kind": "c", "meows": 1}, {"kind": "d", "meows": 1}],
        [{"meows": 1}, {"kind": "x", "meows": 1}],
    ),
    "oneOf of what is required": (
        _object({"a": STRING, "b": STRING}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": ""}, {"b": ""}],
        [{}, {"a": "", "b": ""}],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": ["integer", "null"]}, {"type": ["string", "null"]}]},
        [3, "x"],
        [None, True],
    ),
    "oneOf of ranges": (
        {"oneOf": [{**INTEGER, "minimum": 5}, {**INTEGER, "maximum": 10}]},
        [3, 11],
        [5, 7, 10],
    ),
    "oneOf within allOf": (
        {
            "allOf": [
                {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
                _object({"a": STRING, "b": INTEGER}),
            ]
        },
        [{"a": "x"}, {"b": 1}],
        [{"a": "x", "b": 1}],
    ),
    "recursion": (
        {"$ref": "#/$defs/L", "$defs": {"L": LIST}},
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}, {"v": 1, "next": 3}],
    ),
    "recursion through allOf": (
        TREES,
        [{"child": {"child": {}}}, {"child": {"x": 3, "y": ""}}],
        [{"child": {"x": ""}}, {"child": {"child": {"child": {"y": 3}}}}],
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
    "an anchor": ({"$ref": "#f", "$defs": {"f": {"$anchor": "f", **INTEGER}}}, [3], ["x"]),
    "a member named $ref": (_object({"$ref": INTEGER}, "$ref"), [{"$ref": 1}], [{"$ref": ""}]),
    "an id within": (
        {
            "$ref": "b.json",
            "$defs": {"b": {"$id": "b.json", "$ref": "#/$defs/n", "$defs": {"n": INTEGER}}},
        },
        [3],
        ["x"],
    ),
    "an address that is no URL": (
        {"$id": "urn:uuid:1", "$ref": "#/$defs/n", "$defs": {"n": INTEGER}},
        [3],
        ["x"],
    ),
    "control characters": ({"enum": ["a\0b", "ab\n"]}, ["ab\n"], ["ab"]),
    "names of hosts": (
        {"type": "string", "format": "hostname"},
        ["a-b.example.com"],
        ["xn--x.com", "-a", "a..b", ""],
    ),
    "an id": (
        {
            "$id": "https://e.com/a.json",
            "$ref": "b.json",
            "$defs": {"b": {"$id": "b.json", **INTEGER}},
        },
        [3],
        ["x"],
    ),
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
    "great bounds": ({**INTEGER, "minimum": -(10**30), "maximum": 10**30}, [0, -5], [0.5]),
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
    "classes of characters": (
        {"type": "string", "pattern": r"^[\p{L}[\]{}/&&-]+\.\d{2}$"},
        ["éß[]{}/&.12"],
        ["1.12", "é.1", "é.123"],
    ),
    "escapes in patterns": (
        {"type": "string", "pattern": r"^\u0041\x42\/\-{3}\cA?$"},
        ["AB/---"],
        ["AB/--"],
    ),
    "names of letters": (
        _object({"é": NULL}, patternProperties={r"^\p{L}+$": {"type": ["integer", "null"]}}),
        [{"é": None}, {"ß": 1}],
        [{"é": 1}, {"1": 1}],
    ),
    "a name that ends in a new line": (
        _object({"a": NULL, "a\n": NULL}, propertyNames={"pattern": "^a+$"}),
        [{"a": None}],
        [{"a\n": None}],
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
    "addresses": (
        {"type": "string", "format": "email"},
        ["ann.b@example.co.uk"],
        ["a@b", "a b@c.de", "a@[1.2.3.4]"],
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
    "contains": (
        {"type": "array", "items": INTEGER, "contains": {"const": 5}, "maxItems": 2},
        [[5], [5, 1]],
        [[], [1]],
    ),
    "unique items are not more than there are": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        [["a", "b"]],
        [["a", "b", "a"]],
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
    "names of a pattern": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER},
        [{"ab": 1}],
        [{"abc": 1}],
    ),
    "allOf": (
        {"allOf": [_object({"a": INTEGER}, "a"), _object({"b": STRING}, "b")]},
        [{"a": 1, "b": ""}],
        [{"a": 1}, {"b": ""}, {"a": 1, "b": "", "c": 1}],
    ),
    "unevaluated": (
        {"allOf": [_object({"a": INTEGER})], "unevaluatedProperties": STRING},
        [{"a": 1, "b": ""}],
        [{"b": 1}],
    ),
    "numbers of members": (
        _object({"a": INTEGER, "b": INTEGER, "c": INTEGER}, minProperties=2, maxProperties=2),
        [{"a": 1, "b": 1}, {"b": 1, "c": 1}],
        [{}, {"a": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "dependent members": (
        _object({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependent schemas": (
        _object({"a": INTEGER, "b": INTEGER}, dependencies={"a": {"properties": {"b": NULL}}}),
        [{"b": 1}, {"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    "if, then, else": (
        CHOICE,
        [{"k": "a", "x": 1}, {"k": "b", "y": 1}],
        [{"k": "a", "y": 1}, {"k": "c", "x": 1}],
    ),
    "not these strings": (
        {"type": "string", "not": {"enum": ["", "a", "ab"]}, "maxLength": 2},
        ["b", "aa", "ac", "ba"],
        ["", "a", "ab"],
    ),
    "not these numbers": ({**INTEGER, "not": {"enum": [0, 7]}}, [-1, 1, 6, 8], [0, 7]),
    "not a type": ({"not": {"type": ["object", "array", "string"]}}, [1, None], ["", {}, []]),
    "none of several": (
        {"not": {"anyOf": [STRING, {"minimum": 3}]}},
        [1, 2.5],
        ["x", 5, None],  # a bound is of numbers: all else fits it
    ),
    "not a member": (
        _object({"a": INTEGER, "b": INTEGER}, **{"not": {"required": ["a"]}}),
        [{"b": 1}, {}],
        [{"a": 1}],
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
}


# What a validator of JSON Schema refuses, or reads in another way than OpenAPI does.
UNJUDGED = ("discriminator without const", "keywords of null", "nullable reference")


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


# What tools may have all the same: strict: false passes it over.
MALFORMED = [
    ({"type": "objekt"}, "type is one of null, .* at #/type"),
    (_object({"a": {"type": "any"}}), "type is one of .* at #/properties/a/type"),
    ({"properties": ["a"]}, "properties has schemas by names at #/properties"),
    ({"items": 3}, "items is a schema at #/items"),
    ({"required": "a"}, "required is a list of names at #/required"),
    ({"enum": "a"}, "enum is a list of values.* at #/enum"),
    ({"anyOf": {}}, "anyOf is a list of schemas at #/anyOf"),
    ({"minLength": -1}, "minLength is a whole number.* at #/minLength"),
    ({"minimum": "3"}, "minimum is a number at #/minimum"),
    ({"multipleOf": 0}, "multipleOf is a number, not 0 at #/multipleOf"),
    ({"$ref": "#/$defs/none"}, r"'#/\$defs/none' is not in the schema at #/\$ref"),
    ({"$ref": "https://e.com/x"}, "https://e.com/x' is not in the schema"),
]
REFUSED = [
    ({"properties": {"a": "string"}}, "not a string at #/properties/a"),
    ({"enum": [float("nan")]}, "a value that is no JSON"),
    ({"$ref": "#"}, "itself without end"),
    ({"anyOf": [{"$ref": "#"}, NULL]}, "itself without end"),
    ({"$ref": "#/$defs/n", "$defs": {"n": _object({"n": {"$ref": "#/$defs/n"}}, "n")}}, "Unsat"),
    ({"allOf": [STRING, NULL]}, "Unsatisfiable"),
    (False, "Unsatisfiable"),
    (_object({"a": {"minimum": 3, "maximum": 2, **INTEGER}}, "a"), "Unsatisfiable"),
    ({"type": "string", "pattern": "a(b"}, "unclosed"),
]


@pytest.mark.parametrize(("schema", "fault"), [*MALFORMED, *REFUSED], ids=str)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, fault: str) -> None:
    is_refused = (schema, fault) in REFUSED
    for strict in (True, False) if is_refused else (True,):
        with pytest.raises(UsageError, match=f"(?s)no answer can have this form.*({fault})"):
            fits(Grammar.json_schema(schema, strict=strict), "1")
    if not is_refused:
        assert len(Grammar.json_schema(schema, strict=False).passed_over) == 1


NOT_HELD = [
    ({"type": "string", "pattern": "^(?!a)"}, "pattern at /"),
    (_object({"a": {"type": "string", "pattern": r"(a)\1"}}, "a"), "pattern at /properties/a"),
    (_object({"a": {"type": "string", "pattern": r"\bx"}}, "a"), "pattern at /properties/a"),
    ({"type": "number", "multipleOf": 0.07}, "multipleOf at /"),
    ({"type": "integer", "multipleOf": 0.123456789}, "multipleOf at /"),
    ({"enum": [2**60]}, "enum at /"),
    ({"type": "string", "not": {"pattern": "a"}}, "not at /"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, "oneOf at /"),
    ({"type": "array", "contains": INTEGER, "maxContains": 2}, "maxContains at /"),
    (_object({f"p{n}": NULL for n in range(30)}, minProperties=15), "minProperties at /"),
]


@pytest.mark.parametrize(("schema", "place"), NOT_HELD, ids=str)
def test_what_cannot_be_held_is_refused_or_passed_over(schema: Any, place: str) -> None:
    with pytest.raises(UsageError, match=rf"cannot be held to {place} \(.*strict: false"):
        fits(Grammar.json_schema(schema), "1")
    grammar = Grammar.json_schema(schema, strict=False)
    assert [each.partition(" (")[0] for each in grammar.passed_over] == [place]
    assert walked(grammar, 0) is not None or walked(grammar, 1) is not None


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "string", "format": "color"}, ["format at /"]),
        ({"type": "array", "uniqueItems": True}, ["uniqueItems at /"]),
        (_object({"a": {"maxLenght": 3}}), ["maxLenght at /properties/a"]),
        ({"type": "string", "contentMediaType": "application/json"}, ["contentMediaType at /"]),
        ({"anyOf": [STRING, {"type": "string", "pattern": "(?=a)"}]}, ["anyOf at /"]),
        ({"title": "t", "default": 1, "x-order": 1, "examples": [], "deprecated": True}, []),
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
        schema = _object({"a": schema}, "a")
    return schema


def _chained(levels: int) -> Any:
    parts = {str(n): _object({"a": {"$ref": f"#/$defs/{n + 1}"}}) for n in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": {**parts, str(levels): STRING}}


SLOW = "a" * 60 + "b"  # to search for (a|a)*$ by trying one way after another
LONG = "^(a|a)*((b+)+)+(.*c){50}$"
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
    "references": {
        "$ref": "#/$defs/0",
        "$defs": {
            **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)},
            "40": STRING,
        },
    },
    "levels of references": _chained(1000),
    "items": {"type": "array", "minItems": 10**9},
    "pattern": {"type": "string", "pattern": "|".join(map(str, range(9_999)))},
    "counts in a pattern": {"type": "string", "pattern": "a{1000000000}", "maxLength": 9},
    "patterns of members": {"patternProperties": {f"^{n}$": STRING for n in range(999)}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_be_too_large_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no answer can have this form"):
        fits(Grammar.json_schema(HOSTILE[name]), "1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": LONG},
        {"type": "array", "maxItems": 10**9, "items": {"type": "string", "maxLength": 10**9}},
        {"type": "object", "maxProperties": 10**9},
        {"type": "number", "minimum": 1e-300, "maximum": 1e300},
        {"type": "integer", "minimum": -(10**400)},
        _nested(60, STRING),
        {"oneOf": [_object({"k": {"const": f"c{n}"}}, "k") for n in range(300)]},
        _chained(150),
        _object({SLOW: NULL}, patternProperties={"^(a|a)*$": STRING}),
        _object({SLOW: NULL}, propertyNames={"pattern": "^(a|a)*$"}),
        {"type": "string", "oneOf": [{"enum": [SLOW, "c"]}, {"pattern": "^(a|a)*$"}]},
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


PARAMETERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "no type": ({"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [1, "", {}, None]),
    "none": (None, [{}], [{"a": 1}, 1]),
    "empty": ({}, [{}], [{"a": 1}, ""]),
    "no properties": ({"type": "object"}, [{}], [{"a": 1}]),
    "any object": ({"type": "object", "additionalProperties": True}, [{"a": 1}], [3]),
    "more types": ({"type": ["object", "null"], "properties": {"a": NULL}}, [{"a": None}], [None]),
    "a union": ({"anyOf": [STRING, CAT]}, [{"kind": "cat", "meows": 1}], [""]),
    "a reference": ({"$ref": "#/$defs/C", "$defs": {"C": CAT}}, [{"kind": "cat", "meows": 1}], []),
    "null for properties": ({"type": "object", "properties": None}, [{}], [{"a": 1}]),
    "passed over": (_object({"a": {"type": "string", "pattern": "(?=x)x"}}), [{"a": "y"}], [3]),
    "an empty list of PHP's": ({"type": "object", "properties": []}, [{}], [{"a": 1}]),
    "types of Python's": (_object({"a": {"type": "str"}}, "a"), [{"a": 1}], [{}, 3]),
    "a lost reference": (_object({"a": {"$ref": "#/definitions/A"}}), [{"a": 1}], [3]),
    "required in a property": (_object({"a": {**INTEGER, "required": True}}), [{"a": 1}], [3]),
    "nothing but true": ({"properties": {"a": True}}, [{"a": [1]}], [{"b": 1}]),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_of_a_call_are_an_object(name: str) -> None:
    parameters, fitting, others = PARAMETERS[name]
    function = {"name": "f"} if name == "none" else {"name": "f", "parameters": parameters}
    grammar = GENERIC.grammar([{"function": function}], required=True, several=False)
    for value in fitting + others:
        call = GENERIC.written([{"function": {"name": "f", "arguments": value}}])
        assert fits(grammar, call) == (value in fitting), value


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        (STRING, "arguments are an object, and no object fits"),
        ({"enum": ["a"]}, "and no object fits"),
        ({"type": "object", "not": {}}, "and no object fits"),
        (_object({"a": False}, "a"), "Unsatisfiable"),
    ],
)
def test_a_tool_that_no_call_fits_is_refused_by_name(parameters: Any, fault: str) -> None:
    tool = {"function": {"name": "f", "parameters": parameters}}
    with pytest.raises(UsageError, match=f"{fault}.* at the parameters of f"):
        GENERIC.grammar([tool], required=False, several=True)


def test_a_strict_tool_is_held_whole() -> None:
    parameters = _object({"a": {"type": "string", "pattern": "(?=x)"}})
    tool = {"function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(UsageError, match="pattern at /properties/a"):
        GENERIC.grammar([tool], required=False, several=True)
