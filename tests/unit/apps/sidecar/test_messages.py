"""What a line of the sidecar's input is taken for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec import Grammar, SamplingParams
from edge_spec.apps.sidecar.messages import (
    Code,
    Params,
    RpcError,
    RpcRequest,
    ToChat,
    UnreadableError,
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
    read = RpcRequest.parse(request(params={"messages": "Hi", "options": {"max_tokens": 4}}))
    assert (read.id, read.method) == (1, "chat")
    asked = read.read(ToChat)
    assert (asked.messages, asked.conversation, asked.options.max_tokens) == ("Hi", "main", 4)


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
    with pytest.raises(UnreadableError) as caught:
        RpcRequest.parse(line)
    assert (caught.value.code, caught.value.id) == (code, id)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "messages is missing"),
        ({"messages": 7}, "messages: 7 should be a valid string or a valid list"),
        ({"messages": [{}, "a"]}, r'messages\[1\]: "a" should be an object'),
        ({"messages": "Hi", "max_tokens": 4}, "max_tokens is no field"),  # belongs into options
        ({"messages": "Hi", "options": {"max_tokens": "4"}}, 'options.max_tokens: "4" should'),
        ({"messages": "Hi", "options": {"stop": ["a", 1]}}, r"options.stop\[1\]: 1 should"),
        ({"messages": "Hi", "conversation": ""}, "conversation: String should have at least"),
    ],
)
def test_wrong_parameters_are_named(params: object, told: str) -> None:
    with pytest.raises(RpcError, match=told) as caught:
        RpcRequest.parse(request(params=params)).read(ToChat)
    assert caught.value.code is Code.INVALID_PARAMS


def test_an_error_that_quotes_a_file_is_fit_to_be_shown() -> None:
    error = ModelFileError("two tensors named \x1b[2J" + "x" * 100_000, remedy="Convert it again.")
    told = failure(1, error)["error"]
    assert told["message"].startswith("two tensors named \ufffd[2Jxxx")
    assert len(told["message"]) < 2000
    assert told["data"] == {"type": "ModelFileError", "remedy": "Convert it again."}


def test_options_are_those_of_the_sdk() -> None:
    given = {"stop": ["a"], "stop_token_ids": [5], "frequency_penalty": 0.5, "gbnf": 'root ::= "a"'}
    asked = RpcRequest.parse(request(params={"messages": "Hi", "options": given})).read(ToChat)
    options = asked.options.answer_options()
    assert (options["stop"], options["stop_token_ids"]) == (["a"], [5])
    assert options["sampling"] == SamplingParams(frequency_penalty=0.5)
    assert options["grammar"] == Grammar.gbnf('root ::= "a"')


def test_two_forms_of_an_answer_contradict_each_other() -> None:
    asked = {"messages": "Hi", "options": {"regex": "a", "lark": "start: A"}}
    with pytest.raises(RpcError, match="regex and lark"):
        RpcRequest.parse(request(params=asked)).read(ToChat).options.answer_options()


@given(
    st.binary(max_size=64) | st.dictionaries(FIELDS, VALUES).map(lambda d: json.dumps(d).encode())
)
def test_any_line_is_a_request_or_unreadable(line: bytes) -> None:
    kinds: tuple[type[Params], ...] = (ToChat, Params)
    try:
        read = RpcRequest.parse(line)
        for kind in kinds:
            read.read(kind)
    except RpcError as error:
        assert str(error)
