"""Members of requests, by our names and by those of other servers, do what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from fixtures.server_requests import (
    BOTH,
    text,
)

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3.0}, {"max_tokens": 3}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"rep_pen": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"stop_sequences": ["a"]}, {"stop": "a"}),
        ({"temp": 1, "random_seed": 7}, {"temperature": 1, "seed": 7}),
        ({"guided_json": AGE}, {"json_schema": AGE}),
        ({"guided_json": json.dumps(AGE)}, {"json_schema": AGE}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {}}),
        ({"response_format": {"type": "json_object", "schema": AGE}}, {"json_schema": AGE}),
        ({"response_format": {"type": "json_schema", "schema": AGE}}, {"json_schema": AGE}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": AGE}}},
            {"json_schema": AGE},
        ),
        ({"guided_grammar": 'root ::= "x" [a-z]+'}, {"grammar": 'root ::= "x" [a-z]+'}),
        ({"guided_regex": "x[a-z]+"}, {"grammar": 'root ::= "x" [a-z]+'}),
        ({"grammar": "start: /x[a-z]+/"}, {"grammar": 'root ::= "x" [a-z]+'}),
    ],
    ids=json.dumps,
)
@BOTH
def test_other_names_mean_the_same(
    client: httpx.Client, path: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    given = {} if "max_tokens" in other else {"max_tokens": 30}
    if not given:
        one = {"max_tokens": None, **one}
    assert text(client, path, **given, **one) == text(client, path, **given, **other)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"json_schema": AGE}, r'\{"age": [1-9][0-9]\}'),
        ({"guided_choice": ['say "no"', "yes"]}, r'say "no"|yes'),
        ({"regex": "[ab]{4}"}, "[ab]{4}"),
        ({"grammar": 'root ::= pair{2}\npair ::= [0-9] "," # two\n'}, "([0-9],){2}"),
    ],
)
@BOTH
def test_an_answer_has_the_form_that_is_asked_for(
    client: httpx.Client, path: str, form: dict[str, Any], fits: str
) -> None:
    assert re.fullmatch(fits, text(client, path, max_tokens=60, **form))
