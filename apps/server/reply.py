"""A reply of any API: its form, and the response that streams it or sends it as one document."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic_core import from_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edge_spec import GenerationResult, PartKind
from edge_spec.apps.server.answer import Ended, Round, ServerAnswer
from edge_spec.apps.server.errors import ApiError, api_error, error_response
from edge_spec.apps.server.metrics import Metrics
from edge_spec.apps.server.models import Models, OpenModel, ServedModel
from edge_spec.apps.server.request import Desk, Work
from edge_spec.apps.server.schema import AnswerBody
from edge_spec.text.parts.part import CallHead

T = TypeVar("T")
EVENTS: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}  # for /openapi.json
_STREAM_HEADERS = {
    "cache-control": "no-store, no-transform",  # whoever packs it waits for more
    "x-accel-buffering": "no",  # so does nginx
}
_SEALED = "edge-spec."


class Reply(ABC):
    """The form of one reply. Each method returns what is sent then; "" sends nothing. A stream
    ends with either `closing` or `failure`."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream
    is_folded: ClassVar[bool] = False  # the document is made of what the stream has told

    def __init__(self, work: Work) -> None:
        self.work = work
        self._request = work.request
        self._model = work.desk.model

    def opening(self) -> str:
        return ""

    @abstractmethod
    def piece(self, round_: Round) -> str:
        """Return what a round wrote."""

    @abstractmethod
    def end(self, ended: Ended) -> str:
        """Return what is left to tell of a choice that is complete."""

    def told(self, rounds: Sequence[Round]) -> str:
        return "".join(self.end(e) if isinstance(e, Ended) else self.piece(e) for e in rounds)

    def closing(self) -> str:
        """Return the end of a stream whose choices are all complete."""
        return ""

    def failure(self, error: ApiError) -> str:
        """Return the end of a stream that an error has ended, in the form of its API."""
        return server_event(error.document())

    def waiting(self) -> str:
        """Return what tells a client that waits for the next round that it is being written."""
        return ": still at work\n\n"  # clients pass over lines that begin with a colon

    @abstractmethod
    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the whole reply, for a client that does not stream."""


class PartsReply(Reply):
    """A reply made of texts, thoughts and calls in the order in which they are written.

    open: the kind of the last part, while it goes on. written: its text so far.
    """

    is_folded = True
    open: PartKind | None = None
    written = ""

    def piece(self, round_: Round) -> str:
        chunk, told = round_.chunk, ""
        if chunk.call is not None or chunk.kind is not self.open:
            if not chunk.text and chunk.call is None:
                return ""  # the beginning of a character, or space after a call
            told = self.begin_part(chunk.kind, chunk.call)
        self.written += chunk.text
        return told + self.add(chunk.text)

    def begin_part(self, kind: PartKind, call: CallHead | None = None) -> str:
        told = self.end_part()
        self.open, self.written = kind, ""
        return told + self.begin(kind, call)

    def end_part(self) -> str:
        told = "" if self.open is None else self.close()
        self.open = None
        return told

    @abstractmethod
    def begin(self, kind: PartKind, call: CallHead | None) -> str:
        """Return the beginning of a part."""

    @abstractmethod
    def add(self, text: str) -> str:
        """Return what goes on with the open part."""

    @abstractmethod
    def close(self) -> str:
        """Return the end of the open part."""


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or what is complete of those of one that was cut."""
    try:
        given = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def server_event(document: Mapping[str, Any], name: str | None = None) -> str:
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(document)}\n\n"


def sealed(thought: str) -> str:
    """Return a thought, encoded, for a client that is not shown it."""
    return _SEALED + b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str | None) -> str:
    """Return the thought, "" of what was not sealed here."""
    if text is None or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


@dataclass
class Running:
    """All answers that are being written. Used in the event loop alone."""

    models: Models
    metrics: Metrics
    request_timeout_s: float
    answers: set[ServerAnswer] = field(default_factory=set)

    async def begin(
        self, model: ServedModel, opened: OpenModel, work: Work, arrived: float
    ) -> ServerAnswer:
        """Waits for a slot, as `Pool.take` does. arrived: on the clock `time.perf_counter`."""
        slot = await opened.pool.take(work.prompts[0], work.request.session_id)
        self.models.hold(model)  # as long as the slot is used, also when the client has left
        waited_s = time.perf_counter() - arrived

        def end() -> None:
            self.answers.discard(answer)
            opened.pool.release(slot)
            self.models.release(model)
            first_s = answer.first_token_s
            first_s = None if first_s is None else waited_s + first_s
            self.metrics.observe_answer(model.name, answer.results, first_s)

        answer = ServerAnswer(slot, work, self.request_timeout_s, end)
        self.answers.add(answer)
        return answer

    async def ask(self, model: str | None, asked: Callable[[Desk], T]) -> T:
        """Return what a model's desk answers in a thread. Raises ApiError for an unknown model."""
        async with self.models.using(self.models.find(model)) as opened:
            return await asyncio.to_thread(asked, opened.desk)

    async def read(self, body: AnswerBody) -> Work:
        """Return what an engine would be asked for. Raises ApiError as `ask` does."""
        return await self.ask(body.model, lambda desk: desk.work(body.request()))

    def cancel(self) -> None:
        """Nothing new begins, what runs ends after its round."""
        self.models.end()
        for answer in self.answers:
            answer.cancel()

    async def ended(self) -> None:
        """Return when no slot is used any more; after `cancel`, that is a round later."""
        while self.answers:
            await next(iter(self.answers)).ended.wait()


class AnswerResponse(Response):
    """Raises ApiError for a model that is not served."""

    def __init__(self, running: Running, body: AnswerBody, kind: type[Reply]) -> None:
        super().__init__()
        self._running = running
        self._model = running.models.find(body.model)
        self._body = body
        self._kind = kind

    def _read(self, desk: Desk) -> Reply:
        return self._kind(desk.work(self._body.request()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that leaves gives its place in the queue or its slot back within a round."""
        answering = asyncio.ensure_future(self._respond(scope, receive, send))
        left = asyncio.ensure_future(_disconnected(receive))
        left.add_done_callback(lambda _: answering.cancel())
        try:
            await answering
        except asyncio.CancelledError:
            if not left.done():
                raise
        finally:
            left.cancel()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status tells of errors until the answer has begun, an event of those after it."""
        arrived = time.perf_counter()
        answer: ServerAnswer | None = None
        try:
            try:
                async with self._running.models.using(self._model) as opened:
                    reply = await asyncio.to_thread(self._read, opened.desk)
                    answer = await self._running.begin(self._model, opened, reply.work, arrived)
                response = await (_begun if reply.work.request.stream else _whole)(answer, reply)
            except Exception as error:
                response = error_response(error, scope["path"])
            if isinstance(response, StreamingResponse):
                await response.stream_response(send)  # who leaves is noticed by `__call__`
            else:
                await response(scope, receive, send)
        finally:
            if answer is not None:
                answer.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: ServerAnswer, reply: Reply) -> Response:
    async for rounds in answer.events():
        if reply.is_folded:
            reply.told(rounds)
    text = await asyncio.to_thread(lambda: json.dumps(reply.document(answer.results)))
    return Response(text, media_type="application/json")


async def _begun(answer: ServerAnswer, reply: Reply) -> Response:
    await answer.begun()
    events = (text async for text in _events(answer, reply) if text)
    return StreamingResponse(events, headers={"content-type": reply.media_type, **_STREAM_HEADERS})


async def _events(answer: ServerAnswer, reply: Reply) -> AsyncIterator[str]:
    yield reply.opening()
    try:
        async for rounds in answer.events():
            yield reply.told(rounds) if rounds else reply.waiting()
    except Exception as error:
        yield reply.failure(api_error(error))
    else:
        yield reply.closing()
