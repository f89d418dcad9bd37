"""The models that a server answers with: which are open, who uses them, and which is closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Literal

from edge_spec import EdgeSpecError
from edge_spec.apps.server.errors import (
    ApiError,
    cannot_be_opened,
    overloaded,
    shutting_down,
)
from edge_spec.apps.server.open_model import Description, Loading, OpenModel
from edge_spec.apps.server.options import ServerOptions
from edge_spec.fitting.fit import fit_together, fits_free_memory, forecast_here
from edge_spec.fitting.forecast import Forecast
from edge_spec.loader.on_demand import ModelOnDemand
from edge_spec.loader.place import PlacedModels

_CLOSING_S = 5.0  # for a model that is being opened when the server ends

_log = logging.getLogger(__name__)


class ServedModel:
    """One of a server's models. Used in the event loop alone.

    users: requests that it is open for, or is being opened for; while there are any, it is not
    closed. is_leaving: its place is wanted by another one, and new requests wait.
    """

    def __init__(self, name: str, on_demand: ModelOnDemand | None) -> None:
        """on_demand: None for one that is open from the start to the end."""
        self.name = name
        self.on_demand = on_demand
        self.opened: OpenModel | None = None
        self.opening: asyncio.Future[ApiError | None] | None = None
        self.description: Description | None = None
        self.forecast: Forecast | None = None  # of what is open
        self.users = 0
        self.num_waiting = 0  # for it to be opened
        self.is_leaving = False
        self.last_use = 0

    @property
    def aliases(self) -> tuple[str, ...]:
        return () if self.on_demand is None else self.on_demand.aliases

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.opened is not None:
            return "loaded"
        return "unloaded" if self.opening is None else "loading"

    def take(self, opened: OpenModel, forecast: Forecast | None) -> None:
        """It is open from now on."""
        self.opened, self.forecast = opened, forecast
        self.description = opened.description


class Models:
    """Opens models that requests ask for, one at a time, and closes the least recently used idle
    one where there would be too many, or where memory does not hold all of them.

    Used in the event loop alone, but for `close`.
    """

    def __init__(self, models: Sequence[ServedModel], options: ServerOptions) -> None:
        """models: the first one is answered with where a request names none."""
        self._models = models
        self._options = options
        self._by_name = {name: each for each in models for name in (each.name, *each.aliases)}
        self._uses = count(1)
        self._turn = asyncio.Lock()  # of those that are opened
        self._released = asyncio.Event()  # another one each time
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: Loading | None = None
        self._has_ended = False

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    def find(self, name: str | None) -> ServedModel:
        """Raises ApiError."""
        if name is None:
            return self.first
        if name not in self._by_name:
            others = ", ".join(repr(each.name) for each in self._models)
            there = f"There {'is' if len(self) == 1 else 'are'} {others}."
            raise ApiError(
                404,
                f"There is no model {name!r} here. {there}",
                code="model_not_found",
                param="model",
            )
        return self._by_name[name]

    @asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[OpenModel]:
        """Keeps the model open within the block. Raises ApiError where it cannot be opened, too
        many wait for that, it takes too long, or the server ends."""
        if model.opened is not None and not model.is_leaving:
            self.hold(model)
        else:
            await self._wait(model)
        assert model.opened is not None
        try:
            yield model.opened
        finally:
            self.release(model)

    def hold(self, model: ServedModel) -> None:
        """It stays open until `release`."""
        model.users += 1
        model.last_use = next(self._uses)

    def release(self, model: ServedModel) -> None:
        model.users -= 1
        model.last_use = next(self._uses)
        if not model.users:
            self._tell_released()

    def end_openings(self) -> None:
        """Nothing is opened any more; those that wait for that are sent away."""
        self._has_ended = True
        for model in self._models:
            if model.opening is not None and not model.opening.done():
                model.opening.set_result(shutting_down())
        self._tell_released()

    def end(self) -> None:
        """Nobody gets a slot any more."""
        self.end_openings()
        for model in self._models:
            if model.opened is not None:
                model.opened.pool.close()

    def close(self) -> None:
        """Closes all that is open. To be called when the event loop has ended."""
        self._has_ended = True
        if self._loading is not None:
            self._loading.discard(_CLOSING_S)
        for model in self._models:
            if model.opened is not None:
                model.opened.close()

    async def _wait(self, model: ServedModel) -> None:
        """Waits until the model is open and held."""
        if model.num_waiting >= self._options.queue + self._options.parallel:
            raise overloaded("Too many requests are waiting.")
        model.num_waiting += 1
        try:
            async with asyncio.timeout(self._options.load_timeout_s):
                while model.is_leaving and not self._has_ended:
                    await self._released.wait()
                self.hold(model)
                try:
                    await self._open(model)
                except BaseException:
                    self.release(model)
                    raise
        except TimeoutError:
            raise overloaded(f"The request has waited too long for {model.name!r}.") from None
        finally:
            model.num_waiting -= 1

    async def _open(self, model: ServedModel) -> None:
        while model.opened is None:
            if self._has_ended:
                raise shutting_down()
            if model.opening is None:
                model.opening = asyncio.get_running_loop().create_future()
                task = asyncio.create_task(self._open_in_turn(model, model.opening))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            error = await asyncio.shield(model.opening)
            if error is not None:
                raise error

    async def _open_in_turn(
        self, model: ServedModel, opening: asyncio.Future[ApiError | None]
    ) -> None:
        async with self._turn:
            error = None
            if model.users and not self._has_ended:
                error = await self._load(model)
            model.opening = None
            if not opening.done():
                opening.set_result(error)

    async def _load(self, model: ServedModel) -> ApiError | None:
        _log.info("opening %s", model.name)
        on_demand = model.on_demand
        assert on_demand is not None  # else it is open
        loop = asyncio.get_running_loop()
        forecasts: list[Forecast | None] = []

        def screen(placed: PlacedModels) -> None:
            found = forecast_here(placed.target, placed.drafts, placed.options)
            self._report("", 0.0)  # there may be no event loop any more
            asyncio.run_coroutine_threadsafe(self._make_room(model, found), loop).result()
            forecasts.append(found)

        def open_model() -> OpenModel:
            engine = on_demand.open(report=self._report, screen=screen)
            return OpenModel(model.name, engine, self._options, is_owned=True)

        loading = self._loading = Loading(open_model)
        try:
            opened = await loading.result()
            self._loading = None
            model.take(opened, forecasts[0] if forecasts else None)
            return None
        except _UnwantedError:
            return None
        except Exception as error:
            if isinstance(error, EdgeSpecError):
                _log.warning("%s cannot be opened: %s", model.name, error)
            else:
                _log.exception("%s cannot be opened", model.name)
            return cannot_be_opened(model.name, error)

    def _report(self, what: str, fraction: float) -> None:
        """Takes progress from the thread that opens: ends what takes long where the server ends."""
        if self._has_ended:
            raise _UnwantedError

    async def _make_room(self, model: ServedModel, forecast: Forecast | None) -> None:
        """Returns when the model may be opened beside those that are. Idle ones are closed; where
        that is not enough, the least recently used one gets no new requests until it is idle.

        Raises _UnwantedError where nobody waits for the model any more.
        """
        try:
            while (must := not self._has_room(forecast)) or not _fits_free_memory(forecast):
                opened = [each for each in self._models if each.opened is not None]
                opened.sort(key=lambda each: each.last_use)
                idle = next((each for each in opened if not each.users), None)
                if idle is not None:
                    await self._close(idle)
                elif must and opened:
                    opened[0].is_leaving = True
                    await self._released.wait()
                else:
                    return  # what other programs use is theirs
                if self._has_ended or not model.users:
                    raise _UnwantedError
        finally:
            for each in self._models:
                each.is_leaving = False
            self._tell_released()

    def _has_room(self, forecast: Forecast | None) -> bool:
        """Tells whether one more is not too many, and all fit the memory of this machine
        together."""
        opened = [each for each in self._models if each.opened is not None]
        limit = self._options.max_models
        if limit is not None and len(opened) >= limit:
            return False
        forecasts = [each.forecast for each in opened] + [forecast]
        return fit_together([each for each in forecasts if each is not None])

    async def _close(self, model: ServedModel) -> None:
        _log.info("closing %s", model.name)
        opened, model.opened, model.forecast = model.opened, None, None
        assert opened is not None
        try:
            await asyncio.to_thread(opened.close)
        except Exception:
            _log.exception("%s failed to close", model.name)

    def _tell_released(self) -> None:
        self._released.set()
        self._released = asyncio.Event()


class _UnwantedError(Exception):
    """Nobody waits any more for the model that is being opened."""


def _fits_free_memory(forecast: Forecast | None) -> bool:
    return forecast is None or fits_free_memory(forecast)
