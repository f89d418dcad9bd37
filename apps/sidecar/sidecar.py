"""What each method does, the conversations that do it, and the process with its pipes and its ends.

A conversation has one engine in a thread of its own, which does what it is asked in order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from io import FileIO
from queue import Empty, Full, Queue, SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO, Literal

from pydantic import ConfigDict, ValidationError, validate_call

from edge_spec import Chunk, EdgeSpecError, Engine, FinishReason, Generation
from edge_spec.apps.answering import Stop
from edge_spec.apps.sidecar import messages
from edge_spec.apps.sidecar.messages import (
    MAX_LINE_BYTES,
    PROTOCOL,
    Code,
    Id,
    RpcError,
    RpcRequest,
    answer_options,
    failure,
    result,
)
from edge_spec.apps.validation import told

MAX_QUEUED = 16  # requests of a conversation
MAX_WAITING = 16  # lines read ahead
CLOSING_S = 2.0  # for rounds in progress; they take as long as they take, but nobody waits longer
MAX_CONVERSATIONS = 4
_MAX_NAME = 200  # characters, of a conversation
_LOOK_S = 1.0  # between two looks whether a signal has come
Send = Callable[[dict[str, Any]], None]
method = validate_call(config=ConfigDict(strict=True))


@dataclass
class Job:
    """Holds what request `id` asks of an engine: `do` gives back its result, or the answer to
    stream, which `stop` ends. produced: by an answer, however it ended."""

    id: Id
    do: Callable[[Engine], Any]
    stop: Stop = field(default_factory=Stop)
    produced: dict[str, Any] | None = None


class SidecarConversation:
    """open_engine: called in the conversation's thread, when first needed; that thread closes it.
    on_done: called with a job before its response is sent.

    The thread ends with the process at the latest, however long its last round takes.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], send: Send, on_done: Callable[[Job], object]
    ) -> None:
        self.engine: Engine | None = None
        self.last_stats: dict[str, Any] | None = None  # of the answer that ended last
        self.between_rounds = Lock()  # held by whoever uses the engine
        self._open_engine = open_engine
        self._send = send
        self._on_done = on_done
        self._jobs: Queue[Job | None] = Queue(MAX_QUEUED)
        self._thread = Thread(target=self._work, name="edge-spec-conversation", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises RpcError where too many wait already."""
        try:
            self._jobs.put_nowait(job)
        except Full:
            text = f"{MAX_QUEUED} requests of this conversation wait already"
            raise RpcError(Code.BUSY, text) from None

    def end(self, timeout_s: float) -> None:
        """End the thread once its jobs are done; wait `timeout_s` for room in the queue."""
        with suppress(Full):
            self._jobs.put(None, timeout=timeout_s)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                response = result(job.id, self._do(job))
            except Exception as error:  # a mistake of ours must not end the other conversations
                _log(error)
                response = failure(job.id, error, job.produced)
            self._on_done(job)
            try:
                self._send(response)
            except ValueError as error:  # what JSON cannot hold, such as a note of another's
                self._send(failure(job.id, error))
        if self.engine is not None:
            self.engine.close()

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
                self._send(messages.chunk_message(job.id, chunk))
        finally:
            job.produced = written = outcome.result.to_dict()
            del written["tokens"]  # they were streamed
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
    """Print what is a mistake of ours."""
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
    """Answers requests on an engine, which it closes. One thread calls `handle`.

    The first conversation uses the engine itself, others are forks of it. Beyond
    MAX_CONVERSATIONS, the idle one that was used longest ago is closed; never the first.
    """

    def __init__(self, engine: Engine, send: Send) -> None:
        self._origin = engine
        self._send = send
        self._jobs: dict[Id, tuple[SidecarConversation, Job]] = {}  # those not answered yet
        self._first = self._conversation(lambda: engine)
        self._conversations: dict[str, SidecarConversation] = {}  # used longest ago first
        self._shut = False
        own = (self.initialize, self.cancel, self.stats, self.shutdown)
        self._methods = {each.__name__: method(each) for each in own}

    def handle(self, line: bytes) -> bool:
        """Answer at once or let a conversation answer; return False for `exit`."""
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
        """Return the result, or the job that answers."""
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
            return call(act, params, engine)  # at once, even within an answer
        if request.id is None:
            raise RpcError(Code.INVALID_REQUEST, "this method needs an id to answer to")
        if request.id in self._jobs:
            raise RpcError(Code.INVALID_REQUEST, f"request {request.id!r} is not answered yet")
        conversation = self._named(name)
        job = Job(request.id, lambda engine: call(act, params, engine))
        self._jobs[job.id] = conversation, job
        try:
            conversation.submit(job)
        except RpcError:
            del self._jobs[job.id]
            raise
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
        _, job = self._jobs.get(id, (None, None))
        if job is not None:
            job.stop.request()
        return {"cancelled": job is not None}

    def stats(self) -> dict[str, Any]:
        jobs = list(self._jobs.values())
        return {
            "conversations": {
                name: {
                    "drafter": (conversation.engine or self._origin).drafter,
                    "requests": [job.id for owner, job in jobs if owner is conversation],
                    "last": conversation.last_stats,
                }
                for name, conversation in self._conversations.items()
            }
        }

    def shutdown(self) -> None:
        """Cancel what runs and free the models within about CLOSING_S. Any thread may call it."""
        self._shut = True
        ends_at = time.monotonic() + CLOSING_S
        for _, job in list(self._jobs.values()):
            job.stop.request()
        everyone = {self._first, *list(self._conversations.values())}
        for conversation in everyone:
            conversation.end(max(0.0, ends_at - time.monotonic()))
        for conversation in everyone:
            conversation.join(max(0.0, ends_at - time.monotonic()))
        if self._first.engine is None:  # nobody has asked it
            self._origin.close()
        self._conversations.clear()

    def _named(self, name: str) -> SidecarConversation:
        """Raises RpcError where there is no room for one more."""
        found = self._conversations.pop(name, None)
        if found is None and not self._conversations:
            found = self._first
        if found is None:
            if len(self._conversations) >= MAX_CONVERSATIONS:
                self._close_an_idle_one()
            found = self._conversation(self._fork)
        self._conversations[name] = found
        return found

    def _close_an_idle_one(self) -> None:
        busy = {conversation for conversation, _ in list(self._jobs.values())}
        for name, conversation in self._conversations.items():
            if conversation is not self._first and conversation not in busy:
                conversation.end(CLOSING_S)
                conversation.join(CLOSING_S)
                del self._conversations[name]
                return
        raise RpcError(Code.BUSY, f"{MAX_CONVERSATIONS} conversations are answering already")

    def _conversation(self, open_engine: Callable[[], Engine]) -> SidecarConversation:
        return SidecarConversation(open_engine, self._send, lambda job: self._jobs.pop(job.id))

    def _fork(self) -> Engine:
        with self._first.between_rounds:
            return self._origin.fork()


class Wire:
    """Has the process's standard input and output for itself: whatever else prints, native
    libraries and child processes included, does so on standard error, and reads nothing.

    `send` may be called from any thread. Where nobody reads any more, it calls `on_lost` and
    drops the message.
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
        """Return the next line without its end, the beginning of one that is too long; None at the
        end of input."""
        with suppress(OSError):  # a terminal that went away
            line = end = self._source.readline(MAX_LINE_BYTES + 1)
            while end and not end.endswith(b"\n"):
                end = self._source.readline(MAX_LINE_BYTES)
            if end:
                return line.removesuffix(b"\n")
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Write a line, in ASCII, so that no reader splits it at one of Unicode's line separators.
        Blocks while the other side does not read."""
        left = memoryview(json.dumps(message, allow_nan=False).encode("ascii") + b"\n")
        try:
            with self._lock:
                while left:
                    left = left[self._sink.write(left) :]
        except OSError:
            self._on_lost()


def run(open_engine: Callable[[], Engine]) -> None:
    """Serve standard input until `exit`, its end, SIGTERM, or until nobody reads an answer;
    then cancel everything and return, for the process to end. Raises what `open_engine` raises.

    This thread only waits, so that it notices every reason to end while a model is opened or a
    pipe is full, too.
    """
    ends: SimpleQueue[None] = SimpleQueue()  # which a signal's handler may put into
    signal.signal(signal.SIGTERM, lambda number, frame: ends.put(None))
    wire = Wire(on_lost=lambda: ends.put(None))
    lines: Queue[bytes] = Queue(MAX_WAITING)
    opened: list[Sidecar] = []
    errors: list[BaseException] = []  # for this thread to raise

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
            # The system may give a signal to another thread, which does not wake this one.
            with suppress(Empty):
                ends.get(timeout=_LOOK_S)
                break
    finally:
        for sidecar in opened:
            sidecar.shutdown()
    for error in errors:
        raise error
