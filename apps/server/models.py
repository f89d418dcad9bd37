"""The models of a server: opening them on demand, counting their users, and closing idle ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from threading import Thread
from typing import TypeVar

from edge_spec import EdgeSpecError, Engine
from edge_spec.apps.server.answer import OpenModel, ServedModel, ServerAnswer, Work
from edge_spec.apps.server.errors import ApiError, cannot_be_opened, overloaded, shutting_down
from edge_spec.apps.server.metrics import Metrics
from edge_spec.apps.server.request import read
from edge_spec.apps.server.schema import AnswerBody
from edge_spec.cli.options import ServerOptions
from edge_spec.loader import ModelOnDemand
from edge_spec.models.memory import Forecast, fit_together, fits_free_memory

T = TypeVar("T")
_LATEST = ":latest"  # Ollama's clients add it to names
_CLOSING_S = 5.0  # longest wait for a model still being opened when the server ends

_log = logging.getLogger(__name__)


class Models:
    """Opens models on demand, one at a time, and closes the least recently used idle one to make
    room. Use it only in the event loop, except for `close`. answers: all that are being written."""

    def __init__(self, models: Sequence[ServedModel], options: ServerOptions) -> None:
        """models: the first one answers requests that name none."""
        self._models = models
        self._options = options
        named = [(name, each) for each in models for name in (each.name, *each.aliases)]
        self._by_name = {f"{name}{_LATEST}": each for name, each in named} | dict(named)
        self.metrics = Metrics(models)
        self.answers: set[ServerAnswer] = set()
        self._uses = count(1)
        self._turn = asyncio.Lock()  # only one model is opened at a time
        self._released = asyncio.Event()
        self._loading: Future[OpenModel] | None = None
        self._has_ended = False

    @staticmethod
    def of(served: Engine | Sequence[ModelOnDemand], options: ServerOptions) -> Models:
        """Open the first model. served: an engine, which stays the caller's to close, or models."""
        if isinstance(served, Engine):
            engine = served
            served = [ModelOnDemand(engine.name, lambda **_: _lent(engine))]
        models = Models(list(map(ServedModel, served)), options)
        models.find(None).take(OpenModel(served[0], options))
        return models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str | None) -> ServedModel:
        """Return a model, the first one without a name. Raises ApiError for an unknown name."""
        if not name:
            return self._models[0]
        if name not in self._by_name:
            others = ", ".join(repr(each.name) for each in self._models)
            there = f"There {'is' if len(self) == 1 else 'are'} {others}."
            told = f"There is no model {name!r} here. {there}"
            raise ApiError(404, told, code="model_not_found", param="model")
        return self._by_name[name]

    @asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[OpenModel]:
        """Keep the model open within the block. Raises ApiError if it cannot be opened in time."""
        self._hold(model)
        try:
            if model.opened is None:
                await self._open(model)
            assert model.opened is not None
            yield model.opened
        finally:
            self._release(model)

    async def ask(self, model: str | None, asked: Callable[[OpenModel], T]) -> T:
        """Call `asked` with a model in a thread. Raises ApiError as `find` and `using` do."""
        async with self.using(self.find(model)) as opened:
            return await asyncio.to_thread(asked, opened)

    async def read(self, body: AnswerBody) -> Work:
        """Return the work that a request asks for. Raises ApiError as `ask` does, and what reading
        the request raises."""
        return await self.ask(body.model, lambda opened: read(opened, body.request()))

    async def begin(
        self, model: ServedModel, opened: OpenModel, work: Work, arrived: float
    ) -> ServerAnswer:
        """Begin an answer once a slot is free. Raises as `Pool.take` does. arrived: a time of
        `time.perf_counter`."""
        slot = await opened.pool.take(work.prompts[0], work.request.body.session_id)
        self._hold(model)  # until the slot is released, even if the client has left
        waited_s = time.perf_counter() - arrived

        def end() -> None:
            self.answers.discard(answer)
            opened.pool.release(slot)
            self._release(model)
            first_s = answer.first_token_s
            first_s = None if first_s is None else waited_s + first_s
            self.metrics.observe_answer(model.name, answer.results, first_s)

        answer = ServerAnswer(slot, work, self._options.request_timeout_s, end)
        self.answers.add(answer)
        return answer

    def _hold(self, model: ServedModel) -> None:
        model.users += 1
        model.last_use = next(self._uses)

    def _release(self, model: ServedModel) -> None:
        model.users -= 1
        model.last_use = next(self._uses)
        self._released.set()
        self._released = asyncio.Event()

    def end_openings(self) -> None:
        """Open no more models, and refuse the requests that wait for one."""
        self._has_ended = True
        for model in self._models:
            if model.opening is not None:
                model.opening.cancel()

    def cancel(self) -> None:
        """Begin nothing new, and end running answers after their round."""
        self.end_openings()
        for model in self._models:
            if model.opened is not None:
                model.opened.pool.close()
        for answer in self.answers:
            answer.cancel()

    async def ended(self) -> None:
        """Return when no slot is in use; after `cancel` that is one round later."""
        while self.answers:
            await asyncio.wait([next(iter(self.answers)).ended])

    def close(self) -> None:
        """Close all models. Call it when the event loop has ended."""
        self._has_ended = True
        if self._loading is not None:
            with suppress(TimeoutError):  # the opening thread closes the model then
                if self._loading.exception(_CLOSING_S) is None:
                    self._loading.result().close()
        for model in self._models:
            if model.opened is not None:
                model.opened.close()

    async def _open(self, model: ServedModel) -> None:
        if model.num_waiting >= self._options.queue + self._options.parallel:
            raise overloaded("Too many requests are waiting.")
        model.num_waiting += 1
        try:
            async with asyncio.timeout(self._options.load_timeout_s):
                while model.opened is None:
                    if self._has_ended:
                        raise shutting_down()
                    opening = model.opening or asyncio.create_task(self._load(model))
                    model.opening = opening
                    await asyncio.wait((opening,))  # a waiter that leaves does not cancel it
                    if not opening.cancelled() and (error := opening.result()):
                        raise error
        except TimeoutError:
            raise overloaded(f"The request has waited too long for {model.name!r}.") from None
        finally:
            model.num_waiting -= 1

    async def _load(self, model: ServedModel) -> ApiError | None:
        """Open the model in its turn, and return the error if that fails."""
        loop = asyncio.get_running_loop()

        def make_room(forecast: Forecast | None) -> None:
            if self._has_ended:  # the event loop may have ended, too
                raise shutting_down()
            asyncio.run_coroutine_threadsafe(self._make_room(model, forecast), loop).result()

        def open_model() -> OpenModel:
            opened = OpenModel(model.on_demand, self._options, lambda *_: None, make_room)
            if self._has_ended:
                opened.close()
                raise shutting_down()
            return opened

        try:
            async with self._turn:
                if not model.users:
                    return None
                _log.info("opening %s", model.name)
                self._loading = _in_thread(open_model)
                model.take(await asyncio.wrap_future(self._loading))
                self._loading = None
        except Exception as error:
            if self._has_ended or not model.users:
                return None
            if isinstance(error, EdgeSpecError):
                _log.warning("%s cannot be opened: %s", model.name, error)
            else:
                _log.exception("%s cannot be opened", model.name)
            return cannot_be_opened(model.name, error)
        finally:
            model.opening = None
        return None

    async def _make_room(self, model: ServedModel, forecast: Forecast | None) -> None:
        """Return when there is room for the model. Close idle models first. If that is not enough,
        wait until another becomes idle. Raises ApiError if nobody waits for the model any more."""
        while (must := not self._has_room(forecast)) or not (
            forecast is None or fits_free_memory(forecast)
        ):
            opened = [each for each in self._models if each.opened is not None]
            opened.sort(key=lambda each: each.last_use)
            idle = next((each for each in opened if not each.users), None)
            if idle is not None:
                await self._close(idle)
            elif must and opened:
                await self._released.wait()
            else:
                return  # memory in use by other programs cannot be freed
            if self._has_ended or not model.users:
                raise shutting_down()

    def _has_room(self, forecast: Forecast | None) -> bool:
        opened = [each.opened for each in self._models if each.opened is not None]
        limit = self._options.max_models
        if limit is not None and len(opened) >= limit:
            return False
        forecasts = [*(each.forecast for each in opened), forecast]
        return fit_together([each for each in forecasts if each is not None])

    async def _close(self, model: ServedModel) -> None:
        _log.info("closing %s", model.name)
        opened, model.opened = model.opened, None
        assert opened is not None
        try:
            await asyncio.to_thread(opened.close)
        except Exception:
            _log.exception("%s failed to close", model.name)


@contextmanager
def _lent(engine: Engine) -> Iterator[Engine]:
    """Leave an engine open, with the drafter that it had."""
    drafter = engine.drafter
    try:
        yield engine
    finally:
        if engine.drafter != drafter:
            engine.set_drafter(drafter)


def _in_thread(open: Callable[[], OpenModel]) -> Future[OpenModel]:
    """Open a model in a daemon thread, which does not outlive the process."""
    result: Future[OpenModel] = Future()
    result.set_running_or_notify_cancel()  # the waiter may be cancelled; the thread goes on

    def run() -> None:
        try:
            result.set_result(open())
        except BaseException as error:  # the waiter gets it, whatever it is
            result.set_exception(error)

    Thread(target=run, name="opening", daemon=True).start()
    return result
