"""The engine for asyncio: the same answers, in turn, and ended within one round."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from edge_spec.engine.async_engine import AsyncEngine
from edge_spec.engine.results import FinishReason
from edge_spec.errors import UsageError
from edge_spec.testing import ScriptedModel

PROMPT = list(b"hello")


class Gate:
    """A model whose passes a test lets through one by one, after the first `free`."""

    def __init__(self, free: int) -> None:
        self.passes = 0
        self.inside = threading.Event()  # a pass waits
        self._free = free
        self._allowed = threading.Semaphore(0)

    def next_logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        self.passes += 1
        if self.passes > self._free:
            self.inside.set()
            assert self._allowed.acquire(timeout=30)
        return np.eye(260, dtype=np.float32)[65 + len(tokens) % 26]

    def allow(self, passes: int = 1) -> None:
        self._allowed.release(passes)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self.inside.wait, 30)
        self.inside.clear()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_answers_are_those_of_the_engine(make_engine: Any, remembers_all: Any) -> None:
    expected = make_engine(remembers_all()).chat("hello", max_tokens=20).text

    async def test() -> None:
        async with AsyncEngine(make_engine(remembers_all())) as llm:
            assert (await llm.chat("hello", max_tokens=20)).text == expected
            assert llm.last is not None and llm.last.text == expected
            chunks = [chunk.text async for chunk in llm.stream("hello", max_tokens=20)]
            assert len(chunks) > 1 and "".join(chunks) == expected
            text = await llm.generate(llm._engine.chat_prompt("hello"), max_tokens=20)
            assert text.text == expected
            with pytest.raises(UsageError, match="max_tokens is 0"):
                await llm.chat("hello", max_tokens=0)
            with pytest.raises(UsageError, match="max_tokens is 0"):
                await anext(llm.stream("hello", max_tokens=0))
        with pytest.raises(UsageError, match="this engine is closed"):
            await llm.chat("hello")

    run(test)


def test_a_cancelled_task_ends_its_answer_within_a_round(make_engine: Any) -> None:
    async def test() -> None:
        gate = Gate(free=3)
        engine = make_engine(ScriptedModel(gate.next_logits, 260))
        llm = AsyncEngine(engine)
        task = asyncio.create_task(llm.generate(PROMPT, max_tokens=50))
        await gate.entered()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # once more, while it waits for the round
        await asyncio.sleep(0)
        assert not task.done()  # the pass is still running
        gate.allow()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.passes == 4
        last = engine.last
        assert last.finish_reason == FinishReason.CANCELLED and len(last.tokens) == 4
        gate.allow(100)
        assert len((await llm.generate(PROMPT, max_tokens=5)).tokens) == 5
        await llm.close()

    run(test)


def test_a_stream_that_is_left_ends_its_answer(make_engine: Any) -> None:
    async def test() -> None:
        gate = Gate(free=2)
        engine = make_engine(ScriptedModel(gate.next_logits, 260))
        llm = AsyncEngine(engine)
        async with aclosing(llm.stream(PROMPT_TEXT, max_tokens=50)) as stream:
            async for _ in stream:
                break
        assert gate.passes == 1 and engine.last.finish_reason == FinishReason.CANCELLED
        await llm.close()

    run(test)


PROMPT_TEXT = "hello"


def test_answers_that_are_asked_for_at_once_take_turns(
    make_engine: Any, remembers_all: Any
) -> None:
    prompts = [list(f"prompt {i}".encode()) for i in range(6)]
    alone = make_engine(remembers_all())
    expected = [alone.generate(prompt, max_tokens=15).text for prompt in prompts]

    async def test() -> None:
        async with AsyncEngine(make_engine(remembers_all())) as llm:
            found = await asyncio.gather(
                *(llm.generate(prompt, max_tokens=15) for prompt in prompts)
            )
            assert [result.text for result in found] == expected
            other = await llm.fork()
            both = await asyncio.gather(
                llm.generate(prompts[0], max_tokens=15), other.generate(prompts[1], max_tokens=15)
            )
            assert [result.text for result in both] == expected[:2]
            await other.close()

    run(test)


def test_the_loop_goes_on_and_drafters_may_change_meanwhile(make_engine: Any) -> None:
    async def test() -> None:
        gate = Gate(free=1)
        llm = AsyncEngine(make_engine(ScriptedModel(gate.next_logits, 260)))

        async def watch() -> AsyncIterator[str]:
            async for chunk in llm.stream(PROMPT_TEXT, max_tokens=4):
                yield chunk.text

        stream = watch()
        assert await anext(stream)
        following = asyncio.ensure_future(anext(stream))
        await gate.entered()
        await llm.set_drafter("none")  # while a pass runs
        assert llm.drafter == "none" and not following.done()
        gate.allow(100)
        await following
        assert len([text async for text in stream]) == 2
        await llm.close()

    run(test)


def test_a_stream_that_was_left_open_does_not_keep_the_engine(
    make_engine: Any, remembers_all: Any
) -> None:
    async def test() -> None:
        async with AsyncEngine(make_engine(remembers_all())) as llm:
            stream = llm.stream("hello", max_tokens=50)
            await anext(stream)
            await llm.close()  # and once more at the end of the block

    run(test)


def test_a_cancel_that_comes_while_a_stream_is_closed_is_not_lost(
    make_engine: Any, remembers_all: Any
) -> None:
    async def test() -> None:
        llm, busy = AsyncEngine(make_engine(remembers_all())), threading.Event()

        async def leave() -> None:
            stream = llm.stream("hello", max_tokens=50)
            await anext(stream)
            llm._thread.submit(busy.wait, 30)
            await stream.aclose()

        task = asyncio.create_task(leave())
        while llm._thread._work_queue.empty():  # what ends the stream waits after that
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)  # the task gets it
        busy.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.close()

    run(test)
