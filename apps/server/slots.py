"""Slots: engines on the same weights, each with a cache and a thread, and who gets which."""

from __future__ import annotations

import asyncio
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
    """Hands out slots in the order of requests. Used in the event loop alone."""

    def __init__(self, slots: Sequence[Slot], queue: int, queue_timeout_s: float) -> None:
        self.slots = slots
        self.num_waiting = 0
        self._free = list(slots)
        self._turns = asyncio.Semaphore(len(slots))  # in the order of arrival
        self._queue = queue
        self._queue_timeout_s = queue_timeout_s
        self._uses = count(1)
        self._closed = False

    @property
    def num_busy(self) -> int:
        return len(self.slots) - len(self._free)

    async def take(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """Return a slot, to be given back by `release`. Raises ApiError if that takes too long."""
        if self.num_waiting >= self._queue and self._turns.locked() and not self._closed:
            raise overloaded("Too many requests are waiting.")
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise overloaded("The request has waited too long.") from None
        finally:
            self.num_waiting -= 1
        if self._closed:
            self._turns.release()  # so that whoever waits hears of it, too
            raise shutting_down()
        slot = self._best(prompt, session_id)
        self._free.remove(slot)
        slot.session_id = session_id
        slot.last_use = next(self._uses)
        return slot

    def release(self, slot: Slot) -> None:
        self._free.append(slot)
        self._turns.release()

    def close(self) -> None:
        """Nobody gets a slot any more, those that wait included."""
        self._closed = True
        self._turns.release()

    def _best(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """Return the session's own slot; else the one that shares most, unless that would drop
        more than it saves; else the least recently used one."""
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
