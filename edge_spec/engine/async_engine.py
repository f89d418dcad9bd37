"""An engine for asyncio that decodes in its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakSet

from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.engine import Engine
from edge_spec.engine.generation import Generation
from edge_spec.engine.request import AnswerOptions, ChatOptions
from edge_spec.engine.results import Chunk, GenerationResult
from edge_spec.text.infill import InfillPrompt
from edge_spec.text.plain_messages import Message

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class AsyncEngine:
    """`Engine` for asyncio. Concurrent requests are answered one after the other; `fork` makes
    another conversation, which answers in parallel.

    Cancelling a task that awaits an answer, or closing a stream, ends the answer after the current
    round.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "edge-spec-engine")
        self._turn = asyncio.Lock()
        self._closed = False
        self._streams: WeakSet[AsyncGenerator[Chunk, None]] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def last(self) -> GenerationResult | None:
        """The last answer, or what there is of it."""
        return self._engine.last

    @property
    def drafter(self) -> str:
        return self._engine.drafter

    def chat_sampling(self, **asked: float | None) -> SamplingParams:
        """Return what `Engine.chat_sampling` does."""
        return self._engine.chat_sampling(**asked)

    async def chat(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> GenerationResult:
        """Answer as `Engine.chat` does."""
        return await self._answer(partial(self._engine.stream, messages, **options))

    async def generate(
        self, prompt: str | Sequence[int], **options: Unpack[AnswerOptions]
    ) -> GenerationResult:
        """Answer as `Engine.generate` does."""
        return await self._answer(lambda: self._engine.generate(prompt, stream=True, **options))

    def infill_prompt(self, prefix: str, suffix: str, **options: Any) -> InfillPrompt:
        """Return the tokens of `Engine.infill_prompt`, for `generate`."""
        return self._engine.infill_prompt(prefix, suffix, **options)

    def stream(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream as `Engine.stream` does.

        If you may leave the loop early, close the iterator (`contextlib.aclosing`): Python does so
        only at garbage collection.
        """
        stream = self._stream(messages, **options)
        self._streams.add(stream)
        return stream

    async def _stream(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Chunk, None]:
        async with self._turn:
            generation = await self._run(self._engine.stream, messages, **options)
            try:
                while (chunk := await self._run(next, generation, None)) is not None:
                    yield chunk
            finally:
                generation.cancel()
                await self._end(generation)

    async def set_drafter(self, names: str) -> None:
        """Change drafters as `Engine.set_drafter` does, also while an answer is written."""
        await asyncio.to_thread(self._engine.set_drafter, names)

    async def fork(self) -> AsyncEngine:
        """Fork as `Engine.fork` does."""
        async with self._turn:
            return AsyncEngine(await _kept(self._run(self._engine.fork)))

    async def snapshot(self, path: str | Path, note: Mapping[str, Any] | None = None) -> None:
        """Write what `Engine.snapshot` does, after earlier answers have ended."""
        async with self._turn:
            await self._run(self._engine.snapshot, path, note)

    async def restore(self, path: str | Path) -> dict[str, Any] | None:
        """Restore as `Engine.restore` does, after earlier answers have ended."""
        async with self._turn:
            return await self._run(self._engine.restore, path)

    async def close(self) -> None:
        """Close as `Engine.close` does, after the current answer; a stream that nobody awaits is
        closed.
        """
        for stream in list(self._streams):
            with suppress(RuntimeError):  # somebody awaits its next chunk
                await stream.aclose()
        async with self._turn:
            await self._run(self._engine.close)
            self._closed = True
            self._thread.shutdown()

    async def _answer(self, start: Callable[[], Generation]) -> GenerationResult:
        async with self._turn:
            generation = await self._run(start)
            try:
                return await self._run(generation.finish)
            except asyncio.CancelledError:
                generation.cancel()
                await self._end(generation)
                raise

    async def _end(self, generation: Generation) -> None:
        """Wait for the current round despite repeated cancellation, so the engine is free
        afterwards.
        """
        ended = asyncio.ensure_future(self._run(generation.close))
        cancelled = False
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                cancelled = True
        ended.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _run(
        self,
        call: Callable[_Parameters, _Result],
        *arguments: _Parameters.args,
        **options: _Parameters.kwargs,
    ) -> _Result:
        if self._closed:
            return call(*arguments, **options)  # it raises the right error
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(call, *arguments, **options))


async def _kept(opening: Coroutine[Any, Any, Engine]) -> Engine:
    """Return the engine; close it if the awaiting task was cancelled."""
    opened = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(opened)
    except asyncio.CancelledError:
        opened.add_done_callback(_close)
        raise


def _close(opened: asyncio.Future[Engine]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.get_loop().run_in_executor(None, opened.result().close)


def awaited(
    opening: Callable[_Parameters, Engine],
) -> Callable[_Parameters, Coroutine[Any, Any, AsyncEngine]]:
    @wraps(opening)
    async def opened(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> AsyncEngine:
        return AsyncEngine(await _kept(asyncio.to_thread(opening, *arguments, **options)))

    return opened
