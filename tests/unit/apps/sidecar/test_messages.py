"""What a line of the sidecar's input is taken for."""

from __future__ import annotations

import json
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec import EdgeSpecError, Grammar, SamplingParams
from edge_spec.apps.sidecar.sidecar import (
    Code,
    RpcError,
    RpcRequest,
    Sidecar,
    answer_options,
    failure,
)
from edge_spec.errors import ModelFileError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(["jsonrpc", "id", "method", "params", "messages", "options"])


def request(**fields: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "chat", **fields}).encode()


def test_a_request_is_read() -> None:
    read = RpcRequest.parse(request(params={"messages": "Hi"}))
    assert (read.id, read.method, read.params) == (1, "chat", {"messages": "Hi"})


@pytest.mark.parametrize(
    ("line", "code", "id"),
    [
        (b"", Code.PARSE, None),
        (b"{", Code.PARSE, None),
        (b"\xff", Code.PARSE, None),
        (b'{"id": NaN}', Code.PARSE, None),
        (b"[" * 100_000, Code.PARSE, None),
        (b"1", Code.INVALID_REQUEST, None),
        (b"[]", Code.INVALID_REQUEST, None),
        (request(id=None), Code.INVALID_REQUEST, None),
        (request(id=True), Code.INVALID_REQUEST, None),
        (request(id=1.5), Code.INVALID_REQUEST, None),
        (request(jsonrpc="1.0"), Code.INVALID_REQUEST, 1),
        (request(id="a", method=7), Code.INVALID_REQUEST, "a"),
        (request(params=["Hi"]), Code.INVALID_PARAMS, 1),
    ],
)
def test_what_is_no_request_is_told_apart(line: bytes, code: Code, id: object) -> None:
    with pytest.raises(RpcError) as caught:
        RpcRequest.parse(line)
    assert (caught.value.code, caught.value.id) == (code, id)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "messages is missing"),
        ({"messages": 7}, "messages: 7 should be a valid string or a valid list"),
        ({"messages": [{}, "a"]}, 'messages[1]: "a" should be an object'),
        ({"messages": "Hi", "max_tokens": 4}, "max_tokens is no field"),  # belongs into options
        ({"messages": "Hi", "options": {"max_token": 4}}, "options.max_token is no field"),
        ({"messages": "Hi", "options": {"max_tokens": "4"}}, "max_tokens is '4'"),
        ({"messages": "Hi", "options": {"top_k": "4"}}, "top_k is '4'"),
        ({"messages": "Hi", "options": {"stop": ["a", 1]}}, "stop is ['a', 1]"),
        ({"messages": "Hi", "options": {"regex": 3}}, "a grammar is 3"),
        ({"messages": "Hi", "conversation": ""}, "conversation has to be a text"),
    ],
)
def test_wrong_parameters_are_named(
    make_engine: Any, remembers_all: Any, params: object, told: str
) -> None:
    sent: Queue[dict[str, Any]] = Queue()
    sidecar = Sidecar(make_engine(remembers_all()), sent.put)
    sidecar.handle(request(params=params))
    error = sent.get(timeout=60)["error"]
    assert error["code"] in (Code.INVALID_PARAMS, Code.EDGE_SPEC)
    assert error["message"].startswith(told)
    sidecar.shutdown()


def test_an_error_that_quotes_a_file_is_fit_to_be_shown() -> None:
    error = ModelFileError("two tensors named \x1b[2J" + "x" * 100_000, remedy="Convert it again.")
    told = failure(1, error)["error"]
    assert told["message"].startswith("two tensors named \ufffd[2Jxxx")
    assert len(told["message"]) < 2000
    assert told["data"] == {"type": "ModelFileError", "remedy": "Convert it again."}


def test_options_are_those_of_the_sdk() -> None:
    given = {"stop": ["a"], "stop_token_ids": [5], "frequency_penalty": 0.5, "gbnf": 'root ::= "a"'}
    assert answer_options(given) == {
        "stop": ["a"],
        "stop_token_ids": [5],
        "sampling": SamplingParams(frequency_penalty=0.5),
        "grammar": Grammar.gbnf('root ::= "a"'),
    }


def test_two_forms_of_an_answer_contradict_each_other() -> None:
    with pytest.raises(RpcError, match="regex and lark"):
        answer_options({"regex": "a", "lark": "start: A"})


@given(
    st.binary(max_size=64) | st.dictionaries(FIELDS, VALUES).map(lambda d: json.dumps(d).encode())
)
def test_any_line_is_a_request_or_unreadable(line: bytes) -> None:
    try:
        answer_options(RpcRequest.parse(line).params)
    except (RpcError, EdgeSpecError) as error:
        assert str(error)
