"""Defines what may be asked, and how answers and errors look, after JSON-RPC 2.0."""

from __future__ import annotations

from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from edge_spec import Chunk, EdgeSpecError, Grammar, PartKind, SamplingParams
from edge_spec.apps.validation import told

PROTOCOL: Final = 1
MAX_LINE_BYTES = 4 * 1024 * 1024
_FORMS = ("json_schema", "regex", "lark", "gbnf")  # options, and makers of `Grammar`
_TOLD = ("max_tokens", "stop", "stop_token_ids", "logprobs", "prediction")
Id = int | str
Asked = TypeVar("Asked", bound="Params")


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
    """Becomes an error response."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class UnreadableError(RpcError):
    """A line that is no request, which is answered even where its `id` could not be read."""

    def __init__(self, code: Code, message: str, id: Id | None = None) -> None:
        super().__init__(code, message)
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
        """Raises UnreadableError."""
        if len(line) > MAX_LINE_BYTES:
            long = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise UnreadableError(Code.INVALID_REQUEST, long)
        try:
            found = from_json(line, allow_inf_nan=False)
        except ValueError as error:
            raise UnreadableError(Code.PARSE, f"not a line of JSON: {error}") from None
        if not isinstance(found, dict):
            raise UnreadableError(
                Code.INVALID_REQUEST, "a line is one request, an object; batches are not supported"
            )
        try:
            request = RpcRequest.model_validate(found)
        except ValidationError as error:
            place, wrong = told(error.errors(include_url=False), found)
            code = Code.INVALID_PARAMS if place[0] == "params" else Code.INVALID_REQUEST
            id = found.get("id")
            raise UnreadableError(code, wrong, id if type(id) in (int, str) else None) from None
        if request.id is None and "id" in found:
            raise UnreadableError(Code.INVALID_REQUEST, "id is null")
        return request

    def read(self, kind: type[Asked]) -> Asked:
        """The parameters. Raises RpcError for missing, unknown or mistyped ones."""
        try:
            return kind.model_validate(self.params)
        except ValidationError as error:
            _, line = told(error.errors(include_url=False), self.params)
            raise RpcError(Code.INVALID_PARAMS, line) from None


class Params(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Nothing(Params):
    pass


class Initialize(Params):
    protocol: Literal[1] = PROTOCOL


class OfConversation(Params):
    conversation: str = Field("main", min_length=1, max_length=200)


class Options(Params):
    """Those of `Engine.chat`, by the same names."""

    max_tokens: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prediction: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None
    gbnf: str | None = None

    @model_validator(mode="after")
    def _can_be_had(self) -> Options:
        self.answer_options()
        return self

    def answer_options(self) -> dict[str, Any]:
        """Raises UsageError for a value out of its range, RpcError for two forms."""
        drawn = self.model_dump(include={each.name for each in fields(SamplingParams)})
        forms = [name for name in _FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise RpcError(Code.INVALID_PARAMS, f"{' and '.join(forms)}: give one of them")
        grammars = [getattr(Grammar, name)(getattr(self, name)) for name in forms]
        return {
            **{name: getattr(self, name) for name in _TOLD},
            "grammar": next(iter(grammars), None),
            "sampling": SamplingParams(**drawn),
        }


class ToChat(OfConversation):
    messages: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: Options = Options()


class ToGenerate(OfConversation):
    prompt: str | list[int]
    options: Options = Options()


class ToSetDrafter(OfConversation):
    drafter: str


class ToSnapshot(OfConversation):
    path: str
    note: dict[str, Any] | None = None


class ToRestore(OfConversation):
    path: str


class ToCancel(Params):
    id: Id


def result(id: Id, value: Any) -> dict[str, Any]:
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
