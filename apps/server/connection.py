"""A client's connection, with limits to how long it may keep the server waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class LimitedConnection(H11Protocol):
    """Is cut where, for `client_timeout_s`, the head of a request stays incomplete or the client
    does not read what it is sent."""

    def __init__(self, *arguments: Any, client_timeout_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._client_timeout_s = client_timeout_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit("head")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._lift(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._limit("head")
        else:
            self._lift("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit("reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._lift("reading")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit("end")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit("end")

    def _limit(self, name: str) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(self._client_timeout_s, self.transport.abort)

    def _lift(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
