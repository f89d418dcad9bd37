"""The requests, answers and errors of the protocol, which is JSON-RPC 2.0 with a message a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from edge_spec import Chunk, EdgeSpecError, Grammar, PartKind, SamplingParams
from edge_spec.apps.validation import told

PROTOCOL: Final = 1
MAX_LINE_BYTES = 4 * 1024 * 1024
_FORMS = ("json_schema", "regex", "lark", "gbnf")  # options, and makers of `Grammar`
_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name != "logit_bias")
_PLAIN = ("max_tokens", "stop", "stop_token_ids", "logprobs", "prediction")
Id = int | str


class Code(IntEnum):
    PARSE = -32700
    INVALID_REQUEST = -32600
    UNKNOWN_METHOD = -32601
    INVALID_PARAMS = -32602
    INTERNAL = -32603
    EDGE_SPEC = -32000  # one of edge-spec's own errors: `data` has its type and remedy
    CANCELLED = -32800  # before the first token
    BUSY = -32001  # a queue is full: nothing was done, and asking again later may do


class RpcError(Exception):
    """Becomes an error response. id: of a request that could not be read, where it has one."""

    def __init__(self, code: Code, message: str, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.id = id


class RpcRequest(BaseModel):
    """id: None for a notification, which gets no response."""

    model_config = ConfigDict(strict=True, frozen=True)
    jsonrpc: Literal["2.0"]
    id: Id | None = None
    method: str
    params: dict[str, Any] = {}

    @staticmethod
    def parse(line: bytes) -> RpcRequest:
        """Raises RpcError."""
        if len(line) > MAX_LINE_BYTES:
            long = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise RpcError(Code.INVALID_REQUEST, long)
        try:
            found = from_json(line, allow_inf_nan=False)
        except ValueError as error:
            raise RpcError(Code.PARSE, f"not a line of JSON: {error}") from None
        if not isinstance(found, dict):
            raise RpcError(
                Code.INVALID_REQUEST, "a line is one request, an object; batches are not supported"
            )
        try:
            request = RpcRequest.model_validate(found)
        except ValidationError as error:
            place, wrong = told(error.errors(include_url=False), found)
            code = Code.INVALID_PARAMS if place[0] == "params" else Code.INVALID_REQUEST
            id = found.get("id")
            raise RpcError(code, wrong, id if type(id) in (int, str) else None) from None
        if request.id is None and "id" in found:
            raise RpcError(Code.INVALID_REQUEST, "id is null")
        return request


def answer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as `Engine.chat` takes them and checks them. Raises UsageError, RpcError."""
    forms = [name for name in _FORMS if given.get(name) is not None]
    if len(forms) > 1:
        raise RpcError(Code.INVALID_PARAMS, f"{' and '.join(forms)}: give one of them")
    for name in given:
        if name not in (*_FORMS, *_SAMPLING, *_PLAIN):
            raise RpcError(Code.INVALID_PARAMS, f"options.{name} is no field that is known here")
    return {
        **{name: given[name] for name in _PLAIN if name in given},
        "grammar": next((getattr(Grammar, name)(given[name]) for name in forms), None),
        "sampling": SamplingParams(**{name: given[name] for name in _SAMPLING if name in given}),
    }


def result(id: Id | None, value: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": value}


def failure(
    id: Id | None, error: Exception, produced: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the error response. produced: the result of an answer that had begun."""
    kind = type(error).__name__
    told: dict[str, Any] = {"code": int(Code.INTERNAL), "message": kind}
    if isinstance(error, RpcError):
        told = {"code": int(error.code), "message": str(error)}
    elif isinstance(error, EdgeSpecError):
        written = {} if produced is None else {"result": produced}
        data = {"type": kind, "remedy": error.remedy, **written}
        told = {"code": int(Code.EDGE_SPEC), "message": error.shown, "data": data}
    return {"jsonrpc": "2.0", "id": id, "error": told}


def chunk_message(id: Id, part: Chunk) -> dict[str, Any]:
    """A notification: what one round added to a part of the answer of request `id`."""
    tokens = [token.to_dict() for token in part.tokens]
    params: dict[str, Any] = {"id": id, "text": part.text, "tokens": tokens}
    if part.kind is not PartKind.TEXT:
        params["kind"] = part.kind.value
    if part.call is not None:
        params["call"] = asdict(part.call)
    return {"jsonrpc": "2.0", "method": "chunk", "params": params}
