"""JSON-RPC 2.0 on standard input and output, one message a line, for `edge-spec serve --stdio`.

`run` reads lines, `Sidecar` dispatches them, and each `SidecarConversation` answers its requests in
order, on an engine of its own in a thread of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from importlib.metadata import version
from io import FileIO
from queue import Empty, Queue, SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, validate_call
from pydantic_core import from_json

from edge_spec import (
    Chunk,
    EdgeSpecError,
    Engine,
    FinishReason,
    Generation,
    Grammar,
    PartKind,
    SamplingParams,
)
from edge_spec.apps.answering import Stop
from edge_spec.apps.validation import told

PROTOCOL: Final = 1
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_QUEUED = 16  # requests of a conversation behind the running one
MAX_WAITING = 16  # lines read ahead
CLOSING_S = 2.0  # longest wait for rounds in progress
MAX_CONVERSATIONS = 4
_MAX_NAME = 200  # characters in a conversation's name
_LOOK_S = 1.0  # between checks for a signal
_FORMS = ("json_schema", "regex", "lark", "gbnf")  # both options and constructors of `Grammar`
_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name != "logit_bias")
_PLAIN = ("max_tokens", "stop", "stop_token_ids", "logprobs", "prediction")
Id = int | str
Send = Callable[[dict[str, Any]], None]
method = validate_call(config=ConfigDict(strict=True))


class Code(IntEnum):
    PARSE = -32700
    INVALID_REQUEST = -32600
    UNKNOWN_METHOD = -32601
    INVALID_PARAMS = -32602
    INTERNAL = -32603
    EDGE_SPEC = -32000  # an EdgeSpecError: `data` has its type and remedy
    CANCELLED = -32800  # before the first token
    BUSY = -32001  # a queue is full: nothing was done; retrying later may succeed


class RpcError(Exception):
    """Becomes an error response. id: the request's, even if the rest of it is invalid."""

    def __init__(self, code: Code, message: str, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.id = id


class RpcRequest(BaseModel):
    """A JSON-RPC request. id: None for a notification, which gets no response."""

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
    """Return JSON-RPC options as arguments of `Engine.chat`. Raises UsageError, RpcError."""
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
    """Return the error response. produced: the partial result of an answer that had begun."""
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
    """Return the notification of what one round added to the answer to request `id`."""
    tokens = [token.to_dict() for token in part.tokens]
    params: dict[str, Any] = {"id": id, "text": part.text, "tokens": tokens}
    if part.kind is not PartKind.TEXT:
        params["kind"] = part.kind.value
    if part.call is not None:
        params["call"] = asdict(part.call)
    return {"jsonrpc": "2.0", "method": "chunk", "params": params}


@dataclass
class Job:
    """A request to an engine.

    do: returns the result, or the Generation to stream. stop: ends that. produced: an answer's
    result, however it ended.
    """

    id: Id
    do: Callable[[Engine], Any]
    stop: Stop = field(default_factory=Stop)
    produced: dict[str, Any] | None = None


class SidecarConversation:
    """Answers its jobs in order in one thread.

    jobs: those not answered yet, by request id. last_stats: of the latest answer. between_rounds:
    hold this lock to use the engine.
    """

    def __init__(
        self, send: Send, open_engine: Callable[[], Engine], engine: Engine | None = None
    ) -> None:
        """open_engine: called in the conversation's thread at its first job unless `engine` is
        given. That thread also closes the engine."""
        self.engine = engine
        self.jobs: dict[Id, Job] = {}
        self.last_stats: dict[str, Any] | None = None
        self.between_rounds = Lock()
        self._send = send
        self._open_engine = open_engine
        self._thread = ThreadPoolExecutor(1, "edge-spec-conversation")

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RpcError if too many wait already."""
        if len(self.jobs) > MAX_QUEUED:
            text = f"{MAX_QUEUED} requests of this conversation wait already"
            raise RpcError(Code.BUSY, text)
        self.jobs[job.id] = job
        self._thread.submit(self._work, job)

    def end(self) -> Future[None]:
        """Close the engine once all jobs are done."""
        return self._thread.submit(self._close)

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _work(self, job: Job) -> None:
        try:
            response = result(job.id, self._do(job))
        except Exception as error:  # a bug must not end the other conversations
            _log(error)
            response = failure(job.id, error, job.produced)
        del self.jobs[job.id]
        try:
            self._send(response)
        except ValueError as error:  # not valid JSON, such as NaN in a restored note
            self._send(failure(job.id, error))

    def _do(self, job: Job) -> Any:
        if job.stop.requested:
            raise RpcError(Code.CANCELLED, "cancelled before it began")
        if self.engine is None:
            self.engine = self._open_engine()
        with self.between_rounds:
            outcome = job.do(self.engine)
        if not isinstance(outcome, Generation):
            return outcome
        job.stop.watch(outcome)
        try:
            while (chunk := self._next(outcome)) is not None:
                self._send(chunk_message(job.id, chunk))
        finally:
            job.produced = written = outcome.result.to_dict()
            del written["tokens"]  # already streamed
            self.last_stats = written["stats"]
        if outcome.result.finish_reason is FinishReason.CANCELLED and not outcome.result.tokens:
            read = f"{outcome.num_read} of {outcome.result.stats.prompt_n}"
            raise RpcError(
                Code.CANCELLED,
                f"cancelled after {read} tokens of the prompt were read; asking again goes on from "
                "there",
            )
        return written

    def _next(self, generation: Generation) -> Chunk | None:
        with self.between_rounds:
            return next(generation, None)


def _log(error: Exception) -> None:
    """Print the traceback of an unexpected error."""
    if not isinstance(error, RpcError | EdgeSpecError):
        traceback.print_exc()


@method
def _chat(
    engine: Any,
    *,
    messages: str | list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    return engine.chat(messages, stream=True, tools=tools or (), **answer_options(options or {}))


@method
def _generate(
    engine: Any, *, prompt: str | list[int], options: dict[str, Any] | None = None
) -> Any:
    return engine.generate(prompt, stream=True, **answer_options(options or {}))


@method
def _set_drafter(engine: Any, *, drafter: str) -> dict[str, str]:
    engine.set_drafter(drafter)
    return {"drafter": engine.drafter}


@method
def _snapshot(engine: Any, *, path: str, note: dict[str, Any] | None = None) -> None:
    engine.snapshot(path, note)


@method
def _restore(engine: Any, *, path: str) -> dict[str, Any]:
    return {"note": engine.restore(path)}


_OF_ENGINE: dict[str, Callable[..., Any]] = {  # methods of a conversation
    "chat": _chat,
    "generate": _generate,
    "set_drafter": _set_drafter,
    "snapshot": _snapshot,
    "restore": _restore,
}


def call(act: Callable[..., Any], params: dict[str, Any], *first: Any) -> Any:
    """Call a method. Raises RpcError for missing, unknown or mistyped parameters."""
    try:
        return act(*first, **params)
    except ValidationError as error:
        _, line = told(error.errors(include_url=False), params)
        raise RpcError(Code.INVALID_PARAMS, line) from None


class Sidecar:
    """Answers requests on an engine, which it closes. Only one thread may call `handle`.

    The first conversation uses the engine itself, the others forks of it. Beyond MAX_CONVERSATIONS
    the least recently used idle one is closed, but never the first.
    """

    def __init__(self, engine: Engine, send: Send) -> None:
        self._origin = engine
        self._send = send
        self._first = SidecarConversation(send, self._fork, engine)
        self._conversations: dict[str, SidecarConversation] = {}  # least recently used first
        self._shut = False
        own = (self.initialize, self.cancel, self.stats, self.shutdown)
        self._methods = {each.__name__: method(each) for each in own}

    def handle(self, line: bytes) -> bool:
        """Answer the line, or queue it for a conversation. Return False for `exit`."""
        try:
            request = RpcRequest.parse(line)
        except RpcError as error:
            self._send(failure(error.id, error))
            return True
        if request.method == "exit":
            return False
        try:
            value = self._answer(request)
        except Exception as error:
            _log(error)
            if request.id is not None:
                self._send(failure(request.id, error))
            else:
                print(f"edge-spec: in a notification: {error}", file=sys.stderr)
        else:
            if request.id is not None and not isinstance(value, Job):
                self._send(result(request.id, value))
        return True

    def _answer(self, request: RpcRequest) -> Any:
        """Return the result, or the job that will answer."""
        if self._shut:
            raise RpcError(Code.INVALID_REQUEST, "after shutdown there is only exit")
        if request.method in self._methods:
            return call(self._methods[request.method], request.params)
        act = _OF_ENGINE.get(request.method)
        if act is None:
            raise RpcError(Code.UNKNOWN_METHOD, f"there is no method {request.method!r}")
        params = dict(request.params)
        name = params.pop("conversation", "main")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            expected = f"a text of 1 to {_MAX_NAME} characters"
            raise RpcError(Code.INVALID_PARAMS, f"conversation has to be {expected}")
        if act is _set_drafter and (engine := self._named(name).engine) is not None:
            return call(act, params, engine)  # at once, even during an answer
        if request.id is None:
            raise RpcError(Code.INVALID_REQUEST, "this method needs an id to answer to")
        if self._job(request.id) is not None:
            raise RpcError(Code.INVALID_REQUEST, f"request {request.id!r} is not answered yet")
        job = Job(request.id, lambda engine: call(act, params, engine))
        self._named(name).submit(job)
        return job

    def initialize(self, *, protocol: Literal[1] = PROTOCOL) -> dict[str, Any]:
        engine = self._origin
        return {
            "protocol": protocol,
            "version": version("edge-spec"),
            "model": engine.name,
            "runtime": engine.runtime,
            "drafter": engine.drafter,
            "drafters": engine.drafters,
            "context_length": engine.context_length,
            "max_conversations": MAX_CONVERSATIONS,
        }

    def cancel(self, *, id: int | str) -> dict[str, bool]:
        job = self._job(id)
        if job is not None:
            job.stop.request()
        return {"cancelled": job is not None}

    def stats(self) -> dict[str, Any]:
        return {
            "conversations": {
                name: {
                    "drafter": (conversation.engine or self._origin).drafter,
                    "requests": list(conversation.jobs),
                    "last": conversation.last_stats,
                }
                for name, conversation in list(self._conversations.items())
            }
        }

    def shutdown(self) -> None:
        """Cancel all jobs and close the engines, in about CLOSING_S. Callable from any thread."""
        self._shut = True
        everyone = {self._first, *list(self._conversations.values())}
        for conversation in everyone:
            for job in list(conversation.jobs.values()):
                job.stop.request()
        wait([conversation.end() for conversation in everyone], CLOSING_S)
        self._conversations.clear()

    def _job(self, id: Id) -> Job | None:
        found = (each.jobs.get(id) for each in list(self._conversations.values()))
        return next(filter(None, found), None)

    def _named(self, name: str) -> SidecarConversation:
        """Return the conversation, new if need be. Raises RpcError if there is no room for it."""
        found = self._conversations.pop(name, None)
        if found is None and not self._conversations:
            found = self._first
        if found is None:
            if len(self._conversations) >= MAX_CONVERSATIONS:
                self._close_an_idle_one()
            found = SidecarConversation(self._send, self._fork)
        self._conversations[name] = found
        return found

    def _close_an_idle_one(self) -> None:
        for name, conversation in list(self._conversations.items()):
            if conversation is not self._first and not conversation.jobs:
                wait([conversation.end()], CLOSING_S)
                self._conversations.pop(name, None)
                return
        raise RpcError(Code.BUSY, f"{MAX_CONVERSATIONS} conversations are answering already")

    def _fork(self) -> Engine:
        with self._first.between_rounds:
            return self._origin.fork()


class Wire:
    """Takes over the process's standard input and output.

    Everything else in the process, native libraries and child processes included, then prints to
    standard error and reads nothing. `send` may be called from any thread. If the reader has gone,
    it calls `on_lost` and drops the message.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        sys.stdout.flush()
        self._on_lost = on_lost
        self._lock = Lock()
        # Duplicates are not inherited, so no child process keeps the other program's pipes open.
        self._source: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._sink = FileIO(os.dup(1), "wb")
        os.dup2(2, 1)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (no file of the file system)
            os.dup2(nothing.fileno(), 0)

    def read(self) -> bytes | None:
        """Return the next line without its newline, or None at the end of input. Of a line that is
        too long, return only its first MAX_LINE_BYTES + 1 bytes."""
        with suppress(OSError):  # the terminal went away
            line = end = self._source.readline(MAX_LINE_BYTES + 1)
            while end and not end.endswith(b"\n"):
                end = self._source.readline(MAX_LINE_BYTES)
            if end:
                return line.removesuffix(b"\n")
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Write a message as one line. Blocks while the other side does not read. ASCII, so that no
        reader splits it at one of Unicode's line separators."""
        left = memoryview(json.dumps(message, allow_nan=False).encode("ascii") + b"\n")
        try:
            with self._lock:
                while left:
                    left = left[self._sink.write(left) :]
        except OSError:
            self._on_lost()


def run(open_engine: Callable[[], Engine]) -> None:
    """Serve until `exit`, the end of input, SIGTERM, or until nobody reads the answers.

    Then cancel everything and return. Raises what `open_engine` raises. The calling thread only
    waits, so that it notices each of these even while a model is opened or a pipe is full.
    """
    ends: SimpleQueue[None] = SimpleQueue()  # safe to put into from a signal handler
    signal.signal(signal.SIGTERM, lambda number, frame: ends.put(None))
    wire = Wire(on_lost=lambda: ends.put(None))
    lines: Queue[bytes] = Queue(MAX_WAITING)
    opened: list[Sidecar] = []
    errors: list[BaseException] = []  # raised by the calling thread

    def read() -> None:
        while (line := wire.read()) is not None:
            lines.put(line)
        ends.put(None)

    def answer() -> None:
        try:
            opened.append(Sidecar(open_engine(), wire.send))
            while opened[0].handle(lines.get()):
                pass
        except BaseException as error:
            errors.append(error)
        ends.put(None)

    for work in (read, answer):
        Thread(target=work, daemon=True).start()
    try:
        while True:
            # The signal may reach another thread, which does not wake this one.
            with suppress(Empty):
                ends.get(timeout=_LOOK_S)
                break
    finally:
        for sidecar in opened:
            sidecar.shutdown()
    for error in errors:
        raise error
