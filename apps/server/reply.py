"""A reply of any API: its form, its figures, and the response that streams it or sends it as one
document."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, ClassVar

from pydantic_core import from_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edge_spec import FinishReason, GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Round, ServerAnswer, Work
from edge_spec.apps.server.errors import ApiError, api_error, error_response
from edge_spec.apps.server.models import Models
from edge_spec.apps.server.request import read
from edge_spec.apps.server.schema import AnswerBody
from edge_spec.engine.results import Alternative
from edge_spec.text.parts.part import CallHead

_STREAM_HEADERS = {
    "cache-control": "no-store, no-transform",  # whoever packs it waits for more
    "x-accel-buffering": "no",  # so does nginx
}
_SEALED = "edge-spec."
_NEVER = -9999.0  # OpenAI's for a probability of 0, whose logarithm JSON cannot write
_SUMMED = (
    *("prompt_n", "cached_n", "prompt_ms", "predicted_n", "stop_n", "predicted_ms", "near_ties"),
    *("draft_n", "draft_n_accepted", "draft_ms", "verify_ms", "anticipated_n", "overlapped_n"),
    *("rounds", "plain_rounds", "acceptance_histogram", "plain_reasons", "overlap_reasons"),
)


class Reply(ABC):
    """The form of one reply. Each method returns what is sent then; "" sends nothing. A stream
    ends with either `closing` or `failure`."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream

    def __init__(self, work: Work) -> None:
        self.work = work
        self._request = work.request
        self._model = work.model.name

    def opening(self) -> str:
        return ""

    @abstractmethod
    def piece(self, round_: Round) -> str:
        """Return what a round wrote."""

    @abstractmethod
    def end(self, round_: Round, result: GenerationResult) -> str:
        """Return what is left to tell of a choice that is complete."""

    def told(self, rounds: Sequence[Round]) -> str:
        return "".join(
            self.piece(each) if each.result is None else self.end(each, each.result)
            for each in rounds
        )

    def closing(self) -> str:
        """Return the end of a stream whose choices are all complete."""
        return ""

    def failure(self, error: ApiError) -> str:
        """Return the end of a stream that an error has ended, in the form of its API."""
        return server_event(error.document("/v1/"))

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


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the statistics of all choices of a reply, sums and rates over the sums, and those that
    llama.cpp's server names otherwise."""
    every = [result.stats for result in results]
    stats = replace(
        every[0],
        **{name: reduce(add, (getattr(each, name) for each in every)) for name in _SUMMED},
        plain_per_second=next(filter(None, (s.plain_per_second for s in reversed(every))), None),
        failed_drafters=tuple({name: None for each in every for name in each.failed_drafters}),
    )
    read_n, told = stats.prompt_n - stats.cached_n, stats.to_dict()
    del told["drafters"]  # the tokens of `speculative` tell more
    return {
        **told,
        "cache_n": stats.cached_n,
        "prompt_n": read_n,
        "prompt_per_token_ms": _ratio(stats.prompt_ms, read_n),
        "prompt_per_second": _ratio(read_n * 1e3, stats.prompt_ms),
        "predicted_per_token_ms": _ratio(stats.predicted_ms, stats.predicted_n),
    }


def usage(results: Sequence[GenerationResult], choices_a_prompt: int) -> dict[str, Any]:
    """Tokens as OpenAI counts them: each prompt once, however many choices it has."""
    first = [result.stats for result in results[::choices_a_prompt]]
    prompt_n = sum(stats.prompt_n for stats in first)
    predicted_n = sum(result.stats.predicted_n for result in results)
    counts = [result.prediction for result in results if result.prediction is not None]
    details = {}
    if counts:
        details["accepted_prediction_tokens"] = sum(each.accepted for each in counts)
        details["rejected_prediction_tokens"] = sum(each.rejected for each in counts)
    if reasoning_n := sum(result.reasoning_n for result in results):
        details["reasoning_tokens"] = reasoning_n
    return {
        "prompt_tokens": prompt_n,
        "completion_tokens": predicted_n,
        "total_tokens": prompt_n + predicted_n,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_n for stats in first)},
        **({"completion_tokens_details": details} if details else {}),
    }


def _ratio(dividend: float, divisor: float) -> float:
    return round(dividend / divisor, 3) if divisor else 0.0


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the tokens of the text, without an end token, which `usage` counts. The token that was
    chosen is among its alternatives."""
    scored = [_scored(token) for token in tokens if not token.ends]
    content = [_entry(own) | {"top_logprobs": list(map(_entry, tops))} for own, tops in scored]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """offset: of the first token in the text, in characters. Of tokens with one text, the likeliest
    is listed."""
    written = [token for token in tokens if not token.ends]
    scored = [_scored(token) for token in written]
    tops: list[dict[str, float]] = [{} for _ in scored]
    for top, (_, listed) in zip(tops, scored, strict=True):
        for each in listed:
            top.setdefault(_name(each), _finite(each.logprob))
    sizes = [len(token.text) for token in written]
    return {
        "tokens": [_name(own) for own, _ in scored],
        "token_logprobs": [_finite(own.logprob) for own, _ in scored],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": list(accumulate(sizes[:-1], initial=offset)) if sizes else [],
    }


def _scored(token: Token) -> tuple[Alternative, list[Alternative]]:
    """Return the token, and the likeliest ones in its place, which it is one of."""
    own = Alternative(token.id, token.name, token.logprob or 0.0, token.raw)
    tops = [own if each.id == own.id else each for each in token.alternatives]
    return own, tops if own in tops or not tops else [*tops, own]


def _name(token: Alternative) -> str:
    """Return its text; a part of a character is "bytes:\\xf0\\x9f"."""
    raw = token.raw
    if raw is None or raw.decode(errors="ignore").encode() == raw:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _entry(token: Alternative) -> dict[str, Any]:
    raw = list(token.raw or b"")
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)


def origin_of(token: Token) -> dict[str, Any]:
    """Return where a token came from; its probability has a place of its own."""
    part = {} if token.kind is PartKind.TEXT else {"kind": token.kind.value}
    named = {"drafter": token.drafter} if token.drafter else {}
    return {"id": token.id, "text": token.text, "origin": token.origin.value, **part, **named}


def reason_of(result: GenerationResult) -> str:
    """An answer that the server ended early is incomplete, as one that met a limit is."""
    return "stop" if result.finish_reason is FinishReason.STOP else "length"


class AnswerResponse(Response):
    """Raises ApiError for a model that is not served."""

    def __init__(self, models: Models, body: AnswerBody, kind: type[Reply]) -> None:
        super().__init__()
        self._models = models
        self._model = models.find(body.model)
        self._body = body
        self._kind = kind

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
                async with self._models.using(self._model) as opened:
                    request = self._body.request
                    reply = await asyncio.to_thread(lambda: self._kind(read(opened, request())))
                    if reply.work.prompts:  # else the model was only to be opened
                        answer = await self._models.begin(self._model, opened, reply.work, arrived)
                if answer is not None and reply.work.request.body.stream:
                    response = await _begun(answer, reply)
                else:
                    response = await _whole(answer, reply)
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


async def _whole(answer: ServerAnswer | None, reply: Reply) -> Response:
    if answer is not None:
        async for rounds in answer.events():
            if isinstance(reply, PartsReply):  # its document is made of what a stream tells
                reply.told(rounds)
    results = [] if answer is None else answer.results
    text = await asyncio.to_thread(lambda: json.dumps(reply.document(results)))
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
