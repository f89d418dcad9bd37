"""Schemas made at random, of all keywords at once: what is written under one is valid by it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar
from fixtures.form_walks import walked

NAMES = ("a", "b", "c", "kind")
SIMPLE = ("null", "boolean", "number", "integer", "string")
VALUES = (1, 2, "a", "b", None, True, 1.5, {"a": 1}, [1], "abc")


class Maker:
    """Makes a schema of a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        schema = self.schema(0)
        schema = schema if isinstance(schema, dict) else {"items": schema}
        return {**schema, "$defs": {"A": self.schema(1), "B": self.schema(1)}}

    def schema(self, depth: int) -> Any:
        rng = self._rng
        if depth > 3 or rng.random() < 0.02:
            is_plain = rng.random() < 0.3
            return rng.choice((True, False)) if is_plain else {"type": rng.choice(SIMPLE)}
        made: dict[str, Any] = {}
        types = ["object", "string", "integer", "array"]
        if rng.random() < 0.75:
            types = rng.sample([*SIMPLE, "array", "object", "object"], rng.choice((1, 1, 1, 2)))
            made["type"] = types[0] if len(types) == 1 else list(dict.fromkeys(types))
        options = {**self._plain(), **self._containers(depth), **self._joined(depth)}
        for keyword, (share, kinds, make) in options.items():
            if (not kinds or set(kinds) & set(types)) and rng.random() < share:
                made[keyword] = make()
        return made

    def _plain(self) -> dict[str, Any]:
        rng, numbers, text = self._rng, ("number", "integer"), ("string",)
        bound = (0.25, numbers, lambda: rng.choice((0, 1, 2, 3, 5, -1, -3, 10, 0.5, 2.5, -0.5)))
        patterns = ("^a", "b$", "^[a-c]+$", "x|y", r"^\d{2,3}$", "^(ab?c)*$")
        return {
            **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound),
            "multipleOf": (0.15, numbers, lambda: rng.choice((1, 2, 3, 0.5, 5))),
            "minLength": (0.2, text, lambda: rng.randint(0, 4)),
            "maxLength": (0.2, text, lambda: rng.randint(0, 6)),
            "pattern": (0.2, text, lambda: rng.choice(patterns)),
        }

    def _containers(self, depth: int) -> dict[str, Any]:
        rng, lists, objects = self._rng, ("array",), ("object",)

        def inner() -> Any:
            return self.schema(depth + 1)

        def some(most: int) -> list[str]:
            return rng.sample(NAMES, rng.randint(0, most))

        names = ({"enum": ["a", "b", "z"]}, {"pattern": "^[a-z]$"}, {"maxLength": 2})
        return {
            "items": (0.6, lists, inner),
            "prefixItems": (0.2, lists, lambda: [inner()]),
            "minItems": (0.3, lists, lambda: rng.randint(0, 3)),
            "maxItems": (0.3, lists, lambda: rng.randint(0, 4)),
            "properties": (0.8, objects, lambda: {name: inner() for name in some(3)}),
            "required": (0.5, objects, lambda: some(2)),
            "additionalProperties": (0.3, objects, inner),
            "patternProperties": (0.1, objects, lambda: {rng.choice(("^a", "d$")): inner()}),
            "propertyNames": (0.08, objects, lambda: rng.choice(names)),
        }

    def _joined(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def inner() -> list[Any]:
            return [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]

        return {
            "enum": (0.12, (), lambda: rng.sample(VALUES, rng.randint(1, 4))),
            "const": (0.06, (), lambda: rng.choice(VALUES)),
            **dict.fromkeys(("anyOf", "oneOf", "allOf"), (0.14, (), inner)),
            "$ref": (0.12, (), lambda: rng.choice(("#/$defs/A", "#/$defs/B"))),
        }


def _judged(seeds: range) -> int:
    """Returns how many schemas were held."""
    num_held = 0
    for seed in seeds:
        schema = Maker(seed).whole()
        judge, grammar = jsonschema_rs.validator_for(schema), Grammar.json_schema(schema)
        try:
            texts = [walked(grammar, walk, 400) for walk in range(3)]
        except UsageError:
            continue  # nothing fits, or a keyword cannot be held
        if grammar.passed_over:
            continue
        num_held += 1
        for text in filter(None, texts):
            value = json.loads(text)
            if "inf" not in repr(value):  # of a number that Python's floats do not reach
                assert judge.is_valid(value), (seed, text, json.dumps(schema))
    return num_held


def test_answers_are_valid() -> None:
    assert _judged(range(200)) > 60


@pytest.mark.slow
def test_answers_of_many_schemas_are_valid() -> None:
    assert _judged(range(200, 850)) > 200
