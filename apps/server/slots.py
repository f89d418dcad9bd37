"""Slots: engines on the same weights, each with a cache and a thread, and who gets which."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from edge_spec import Engine
from edge_spec.apps.server.errors import overloaded, shutting_down


class Slot:
    """One conversation's cache. The engine is used in the slot's own thread alone.

    tokens: about what the cache holds, to find prompts that begin like it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="slot")
        self.tokens: Sequence[int] = ()
        self.plain_per_second: float | None = None  # measured by its answers so far
        self.session_id: str | None = None
        self.last_use = 0

    def num_shared(self, prompt: Sequence[int]) -> int:
        """Tokens that the prompt begins with and that are in the cache."""
        shared = 0
        for held, token in zip(self.tokens, prompt, strict=False):
            if held != token:
                break
            shared += 1
        return shared


class Pool:
    """Hands out slots, and lets requests wait for one in the order of their arrival.

    Used in the event loop alone.
    """

    def __init__(self, slots: Sequence[Slot], queue: int, queue_timeout_s: float) -> None:
        self.slots = slots
        self._free = list(slots)
        self._queue = queue
        self._queue_timeout_s = queue_timeout_s
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._uses = count(1)
        self._closed = False

    @property
    def num_busy(self) -> int:
        return len(self.slots) - len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """A slot to be given back by `release`. Raises ApiError where too many wait already, it
        takes too long, or the server ends."""
        if self._closed:
            raise shutting_down()
        if self._free:
            slot = self._best(prompt, session_id)
            self._free.remove(slot)
        else:
            slot = await self._wait()
        slot.session_id = session_id
        slot.last_use = next(self._uses)
        return slot

    def release(self, slot: Slot) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(slot)
                return
        self._free.append(slot)

    def close(self) -> None:
        """Nobody gets a slot any more, those that wait included."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(shutting_down())
        self._waiting.clear()

    async def _wait(self) -> Slot:
        if self.num_waiting >= self._queue:
            raise overloaded("Too many requests are waiting.")
        place: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await place
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())  # it came at the moment that the wait ended
            if isinstance(error, TimeoutError):
                raise overloaded("The request has waited too long.") from None
            raise

    def _best(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """The session's own slot; else the one with most to share, unless that would drop more of
        another conversation than it saves; else the one that was not used for longest."""
        for slot in self._free:
            if session_id is not None and slot.session_id == session_id:
                return slot
        shared = {id(slot): slot.num_shared(prompt) for slot in self._free}
        continued = [
            slot for slot in self._free if slot.tokens and 2 * shared[id(slot)] >= len(slot.tokens)
        ]
        if continued:
            return max(continued, key=lambda slot: shared[id(slot)])
        return min(self._free, key=lambda slot: slot.last_use)
