"""A response that is an answer: waits for a slot, streams, and ends when the client leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_spec.apps.server.answer import Ended, Round, ServerAnswer, Work
from edge_spec.apps.server.errors import ApiError, api_error
from edge_spec.apps.server.metrics import Metrics
from edge_spec.apps.server.models import Models, OpenModel, ServedModel
from edge_spec.apps.server.reply import Reply
from edge_spec.apps.server.schema import AnswerRequest
from edge_spec.apps.server.work import Desk

T = TypeVar("T")
EVENTS: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}  # for /openapi.json
_STREAM_HEADERS = [
    (b"cache-control", b"no-store, no-transform"),  # whoever packs it waits for more
    (b"x-accel-buffering", b"no"),  # so does nginx
]


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
        slot = await opened.pool.take(work.prompts[0], work.session_id)
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
        """Returns what a model's desk says to what is asked of it in a thread. model: as
        `AnswerResponse` takes it. Raises ApiError for a model that is not served."""
        async with self.models.using(self.models.find(model or None)) as opened:
            return await asyncio.to_thread(asked, opened.desk)

    def cancel(self) -> None:
        """Nothing new begins, what runs ends after its round."""
        self.models.end()
        for answer in self.answers:
            answer.cancel()

    async def ended(self) -> None:
        """Returns when no slot is used any more; after `cancel`, that is a round later."""
        while self.answers:
            await next(iter(self.answers)).ended.wait()


class AnswerResponse(Response):
    """Raises ApiError for a model that is not served.

    ask: what is asked of an engine; reply: what is made of it. Both are called in a thread.
    """

    def __init__(
        self,
        running: Running,
        request: AnswerRequest,
        ask: Callable[[Desk], Work],
        reply: Callable[[Desk, Work], Reply],
    ) -> None:
        super().__init__()
        self._running = running
        self._model = running.models.find(request.model or None)
        self._ask = ask
        self._reply = reply
        self._is_streamed = request.stream

    def _read(self, desk: Desk) -> tuple[Work, Reply]:
        work = self._ask(desk)
        return work, self._reply(desk, work)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that leaves gives its place in the queue or its slot back within a round."""
        task = asyncio.current_task()
        assert task is not None
        left = asyncio.ensure_future(_disconnected(receive))
        left.add_done_callback(cancel := lambda _: task.cancel())
        try:
            await self._respond(scope["path"], send)
        except asyncio.CancelledError:
            if not left.done():
                raise
            task.uncancel()
        finally:
            left.remove_done_callback(cancel)
            left.cancel()

    async def _respond(self, path: str, send: Send) -> None:
        arrived = time.perf_counter()
        try:
            async with self._running.models.using(self._model) as opened:
                work, reply = await asyncio.to_thread(self._read, opened.desk)
                answer = await self._running.begin(self._model, opened, work, arrived)
        except Exception as error:
            await send_error(send, api_error(error), path)
            return
        try:
            if self._is_streamed:
                await _stream(answer, reply, path, send)
            else:
                await _whole(answer, reply, path, send)
        finally:
            answer.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: ServerAnswer, reply: Reply, path: str, send: Send) -> None:
    try:
        async for events in answer.events():
            for event in events:
                if isinstance(event, Round):
                    reply.collect(event)
    except Exception as error:
        await send_error(send, api_error(error), path)
        return
    text = await asyncio.to_thread(lambda: json.dumps(reply.document(answer.results)))
    await send_json(send, 200, text.encode())


async def _stream(answer: ServerAnswer, reply: Reply, path: str, send: Send) -> None:
    """The status tells of errors until the answer has begun, an event of those after it."""

    async def write(text: str) -> None:
        if text:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    try:
        await answer.begun()
    except Exception as error:
        await send_error(send, api_error(error), path)
        return
    headers = [(b"content-type", reply.media_type.encode()), *_STREAM_HEADERS]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await write(reply.opening())
    try:
        async for events in answer.events():
            told = [reply.end(e) if isinstance(e, Ended) else reply.piece(e) for e in events]
            await write("".join(told) if events else reply.waiting())
    except Exception as error:
        await write(reply.failure(api_error(error)))
    else:
        await write(reply.closing())
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """path: what was asked for."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send_json(send, error.status, error.body(path), headers)


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})
