"""A member of a request that would change the answer and is not honoured is refused, in one line
that names it where it stands and says what to send instead."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fixtures.server_requests import BOTH, post, refusal


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_token": 5}, "max_token is no field that is known here: is max_tokens meant?"),
        ({"temprature": 1}, "temprature is no field that is known here: is temperature meant?"),
        ({"flux": 1}, "flux is no field that is known here: leave it out."),
        ({"typical_p": 0.2}, "typical_p is no field that is known here: leave it out."),
        ({"dry_multiplier": 0.8}, "dry_multiplier is no field that is known here: leave it out."),
        ({"min_tokens": 5}, "min_tokens is no field that is known here: leave it out."),
        ({"extra_body": {"top_k": 1}}, "extra_body is not supported: send its members beside"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n is 64, but penalties are"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict is not what max_tokens says: send one"),
        ({"max_tokens": 0}, "max_tokens: 0 should be from 1 to 2147483647, or -1 for no limit."),
        ({"stop": ["a", 1]}, "stop[1]: 1 should be a valid string."),
        ({"stop": {"a": 1}}, 'stop: {"a": 1} should be a valid string or a valid list.'),
        ({"logit_bias": [[1, 2]]}, "logit_bias: [[1, 2]] should be an object."),
        ({"stream_options": {"include_use": 1}}, "stream_options.include_use is no field"),
        ({"grammar": 'root ::= "a'}, "no answer can have this form (gbnf): Unexpected end"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar is a form beside that of regex"),
        ({"response_format": "json"}, 'response_format: "json" should be an object.'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema is missing.",
        ),
        (
            {"response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema: 5 should be an object.",
        ),
    ],
    ids=json.dumps,
)
@BOTH
def test_what_is_not_honoured_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], told: str
) -> None:
    assert refusal(post(client, path, **body)).startswith(told)
