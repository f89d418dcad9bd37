"""An open model: its slots, the queue for them, and answers.

A slot's thread writes an answer as `Round`s; the event loop reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal

from edge_spec import Chunk, Engine, FinishReason, GenerationResult
from edge_spec.apps.answering import Stop
from edge_spec.apps.server.errors import ApiError, overloaded, shutting_down, timed_out
from edge_spec.apps.server.schema import Request
from edge_spec.cli.options import ServerOptions
from edge_spec.core.model import Progress
from edge_spec.errors import UsageError
from edge_spec.loader import ModelOnDemand
from edge_spec.loader.open import PreparedEngine
from edge_spec.models.memory import Forecast, forecast_here

# Pause between reads of rounds. Event loop and client compete with decoding for the cores, and
# nobody reads faster than this.
_PACE_S = 0.02
_NOTHING = Chunk("", ())
QUIET_S = 15.0  # clients and proxies drop a connection that is silent for longer


class Slot:
    """One conversation's KV cache. Only the slot's own thread uses the engine.

    tokens: approximately what the cache holds, to find prompts with the same prefix.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="slot")
        self.tokens: Sequence[int] = ()
        self.plain_per_second: float | None = None  # measured by its earlier answers
        self.session_id: str | None = None
        self.last_use = 0

    def num_shared(self, prompt: Sequence[int]) -> int:
        """Return how many of the prompt's first tokens are in the cache."""
        pairs = enumerate(zip(self.tokens, prompt, strict=False))
        differing = (place for place, (held, token) in pairs if held != token)
        return next(differing, min(len(self.tokens), len(prompt)))


class Pool:
    """Hands out slots in the order of requests. Use it only in the event loop."""

    def __init__(self, slots: Sequence[Slot], queue: int, queue_timeout_s: float) -> None:
        self.slots = slots
        self.num_waiting = 0
        self._free = list(slots)
        self._turns = asyncio.Semaphore(len(slots))  # first come, first served
        self._queue = queue
        self._queue_timeout_s = queue_timeout_s
        self._uses = count(1)
        self._closed = False

    @property
    def num_busy(self) -> int:
        return len(self.slots) - len(self._free)

    async def take(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """Return a slot, to be given back by `release`. Raises ApiError if the queue is full, the
        wait too long or the pool closed."""
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
            self._turns.release()  # wakes the next waiter, which fails, too
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
        """Refuse all further requests for a slot, including those that wait."""
        self._closed = True
        self._turns.release()

    def _best(self, prompt: Sequence[int], session_id: str | None) -> Slot:
        """Return the session's own slot, else the one that shares the longest prefix.

        Slots that would lose more than half of their tokens do not count. If none is left, return
        the least recently used one.
        """
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


class OpenModel:
    """A model's slots: its engine and forks of it. `close` ends what opening it began."""

    def __init__(
        self,
        model: ModelOnDemand,
        options: ServerOptions,
        report: Progress | None = None,
        make_room: Callable[[Forecast | None], None] = lambda forecast: None,
    ) -> None:
        """make_room: called before weights are read. Raises what opening the model raises, after
        closing what was opened."""
        self.name, self.options = model.name, options
        self.forecast: Forecast | None = None  # of the model's memory

        def screen(placed: PreparedEngine) -> None:
            self.forecast = forecast_here(placed.target, placed.drafts)
            make_room(self.forecast)

        with ExitStack() as opened:
            engine = opened.enter_context(model.open(report=report, screen=screen))
            self.engine, self.drafter = engine, engine.drafter
            forks = [opened.enter_context(engine.fork()) for _ in range(options.parallel - 1)]
            slots = [Slot(each) for each in (engine, *forks)]
            for slot in slots:
                opened.callback(slot.thread.shutdown)
            self.pool = Pool(slots, options.queue, options.queue_timeout_s)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()


class ServedModel:
    """One of a server's models. Use it only in the event loop.

    users: requests that keep it open. num_waiting: requests that wait until it is open.
    """

    def __init__(self, on_demand: ModelOnDemand) -> None:
        self.name, self.aliases = on_demand.name, on_demand.aliases
        self.since = datetime.now(UTC).replace(microsecond=0)
        self.on_demand = on_demand
        self.opened: OpenModel | None = None
        self.opening: asyncio.Task[ApiError | None] | None = None
        self.context_length: int | None = None  # known once it was open
        self.users = 0
        self.num_waiting: int = 0
        self.last_use = 0

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.opened is not None:
            return "loaded"
        return "unloaded" if self.opening is None else "loading"

    def take(self, opened: OpenModel) -> None:
        self.opened, self.context_length = opened, opened.engine.context_length


@dataclass(frozen=True)
class Work:
    """Prompts to answer in turn; each answer is one choice of the reply.

    options: for each choice, for `Engine.generate`.
    """

    model: OpenModel
    request: Request
    prompts: Sequence[Sequence[int]]
    options: Sequence[Any]  # edge_spec.engine.engine.AnswerOptions


@dataclass(frozen=True)
class Round:
    """The text that one or more rounds wrote for a choice. With a result, it ends the choice and
    the chunk is empty."""

    choice: int
    chunk: Chunk
    predicted_n: int
    plain_per_second: float | None
    result: GenerationResult | None = None


class ServerAnswer:
    """An answer, written until it ends or is cancelled even if nobody reads it.

    limit_s: longest time for writing, from the first token on. on_end: called in the event loop
    once the slot is free again.
    """

    def __init__(self, slot: Slot, work: Work, limit_s: float, on_end: Callable[[], None]) -> None:
        self._slot = slot
        self._work = work
        own_s = work.request.limit_s
        self._limit_s = min(limit_s, own_s) if own_s > 0 else limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._made = time.perf_counter()
        self._news = asyncio.Event()
        self._is_awaited = True  # wake the reader at the next round, not only at the last
        self._begun = False
        self.results: list[GenerationResult] = []  # of choices that ended, failed ones included
        self.first_token_s: float | None = None  # since this object was created
        self._events: deque[Round] = deque()
        self._stop = Stop()
        self._stopped: ApiError | None = None  # the reason, once cancelled
        self.ended = self._loop.run_in_executor(slot.thread, self._run)
        self.ended.add_done_callback(self._end)

    def cancel(self, reason: ApiError | None = None) -> None:
        """End after the current round. A choice without a token fails for this reason."""
        self._stopped = self._stopped or reason or shutting_down()
        self._stop.request()

    async def begun(self) -> None:
        """Return once the first choice is being answered. Raises what refused it."""
        while not (self._begun or self.ended.done()):
            await self._wait()
        if not self._begun:
            self.ended.result()

    async def events(self) -> AsyncIterator[list[Round]]:
        """Yield the rounds since the last time, or an empty list after QUIET_S without one. Raises
        what ended the answer early."""
        while True:
            ended = self.ended.done()  # checked before taking events: none comes after the end
            events = [self._events.popleft() for _ in range(len(self._events))]
            if events:
                yield events
                pause = self._loop.call_later(_PACE_S, self._news.set)
                await self._wait()
                pause.cancel()
            elif not ended:
                self._is_awaited = True
                if not self._events and not await self._wait(QUIET_S):
                    yield []
            else:
                self.ended.result()
                return

    async def _wait(self, limit_s: float | None = None) -> bool:
        """Return True if there is news within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        self._is_awaited = False
        return True

    # The slot's thread runs the following methods.

    def _run(self) -> None:
        self._choose_drafter()
        choices = zip(self._work.prompts, self._work.options, strict=True)
        for choice, (prompt, options) in enumerate(choices):
            self._answer(choice, prompt, options)

    def _choose_drafter(self) -> None:
        engine, drafter = self._slot.engine, self._work.request.body.speculation.drafter
        drafter = drafter or self._work.model.drafter
        if engine.drafter == drafter:
            return
        try:
            engine.set_drafter(drafter)
        except UsageError as error:
            raise ApiError(
                400,
                f"{error.shown}. Leave speculative.drafter out, or send auto, none or a name that "
                "GET /edge-spec/info lists.",
                param="speculative",
            ) from error

    def _answer(self, choice: int, prompt: Sequence[int], options: Any) -> None:
        """Answer one choice. Raises ApiError if stopped before the first token."""
        slot = self._slot
        slot.tokens = ()
        generation = slot.engine.generate(prompt, stream=True, **options)
        self._stop.watch(generation)
        self._loop.call_soon_threadsafe(self._begin)
        try:
            for chunk in generation:
                if self.first_token_s is None:
                    self.first_token_s = time.perf_counter() - self._made
                    self._loop.call_soon_threadsafe(self._limit)
                num_tokens = len(generation.result.tokens)
                self._tell(Round(choice, chunk, num_tokens, slot.plain_per_second))
        finally:
            result = generation.result
            if result.finish_reason is not FinishReason.ERROR:  # after one, prefill all again
                slot.tokens = (*prompt, *(token.id for token in result.tokens))
            if result.stats.plain_per_second is not None:
                slot.plain_per_second = result.stats.plain_per_second
            self.results.append(result)
        if self._stopped and result.finish_reason is FinishReason.CANCELLED and not result.tokens:
            num_choices = len(self._work.prompts)
            of = f" of answer {choice + 1} of {num_choices}" if num_choices > 1 else ""
            read = f"{generation.num_read} of {len(prompt)} tokens of the prompt{of} were read"
            told = f"{self._stopped.message} {read}; asking again goes on from there."
            raise replace(self._stopped, message=told)
        num_tokens = len(result.tokens)
        self._tell(Round(choice, _NOTHING, num_tokens, slot.plain_per_second, result))

    def _tell(self, event: Round) -> None:
        self._events.append(event)
        if self._is_awaited or event.result is not None:
            self._is_awaited = False
            self._loop.call_soon_threadsafe(self._news.set)

    # The event loop runs the following methods; the slot's thread schedules them.

    def _begin(self) -> None:
        self._begun = True
        self._news.set()

    def _limit(self) -> None:
        self._timer = self._loop.call_later(self._limit_s, self.cancel, timed_out())

    def _end(self, ended: asyncio.Future[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_end()
        ended.exception()  # marks it as retrieved; `events` raises it for the client
        self._news.set()
