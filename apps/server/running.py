"""A server from start to end, and its listening sockets."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import uvicorn

from edge_spec import Engine
from edge_spec.apps.server.app import build_app
from edge_spec.apps.server.models import Models
from edge_spec.cli.options import ServerOptions
from edge_spec.errors import DeviceError
from edge_spec.loader import ModelOnDemand

_BOTH_FAMILIES = ("127.0.0.1", "localhost")  # many clients reach these by ::1, or try it first
# Longest time to keep an idle connection. Clients keep theirs for about a minute, and most do not
# retry a request whose connection is closed meanwhile.
_KEPT_S = 75
_LAST_S = 5.0  # added to the grace period, for clients that do not read
_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, the first with the port. Raises DeviceError. For localhost listen
    on ::1, too: some clients know only that address, or wait for it first."""
    try:
        opened = [_listen(host, port)]
    except OSError as error:
        raise DeviceError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            remedy="Choose another --port, or 0 for a free one.",
        ) from error
    if host in _BOTH_FAMILIES:
        try:
            opened.append(_listen("::1", opened[0].getsockname()[1]))
        except OSError as error:
            _log.info("not listening on ::1, too: %s", error.strerror or error)
    return opened


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)


class _Server(uvicorn.Server):
    """Ends by a signal, giving running answers a grace period. model: the first one's name.
    interrupted: a SIGINT came."""

    def __init__(
        self, models: Models, options: ServerOptions, sockets: list[socket.socket]
    ) -> None:
        """sockets: listening; the first has the port."""
        self._models = models
        config = uvicorn.Config(
            build_app(models, options),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEPT_S,
            timeout_graceful_shutdown=int(options.grace_s + _LAST_S),
        )
        super().__init__(config)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.port: int = sockets[0].getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self.model = models.find(None).name
        self.interrupted = False
        self._num_signals = 0
        self._sockets = sockets
        self._grace_s = options.grace_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self) -> None:
        """Serve until a signal or `should_exit`."""
        self.run(sockets=self._sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at the first signal; cut all answers at the second; kill the process at the third,
        even if a library does not return."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self._num_signals > 1:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)
        self._num_signals += 1
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.end_openings()  # opening may take longer than the grace period
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._models.cancel)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._cut()
            await self._models.ended()

    def _cut(self) -> None:
        self._models.cancel()
        for connection in self.server_state.connections:
            connection.transport.abort()


@contextmanager
def _opened(served: Engine | Sequence[ModelOnDemand], options: ServerOptions) -> Iterator[_Server]:
    """Yield a server, with the first model opened. Connections wait until it answers."""
    with ExitStack() as opened:
        models = Models.of(served, options)
        opened.callback(models.close)
        sockets = listen(options.host, options.port)
        for each in sockets:
            opened.enter_context(each)
        yield _Server(models, options, sockets)


def run(
    served: Engine | Sequence[ModelOnDemand],
    options: ServerOptions,
    announce: Callable[[str, str, int], None] = lambda model, url, port: None,
) -> None:
    """Serve until a signal, and until answers have ended or `options.grace_s` has passed.

    SIGTERM then returns; SIGINT raises KeyboardInterrupt. An engine is not closed. announce: called
    with the model's name, the address and the port when connections are accepted. Raises
    DeviceError if the address cannot be used, and what opening the first model raises.
    """
    with _opened(served, options) as server:
        with server.capture_signals():  # before announcing: who hears of it may end it
            announce(server.model, server.url, server.port)
            server.answer()
        if server.interrupted:
            raise KeyboardInterrupt


class RunningServer:
    """A server in a thread of this process, for the duration of the block."""

    def __init__(self, served: Engine | Sequence[ModelOnDemand], options: ServerOptions) -> None:
        """served: an engine, which is not closed, or models, of which the first is opened now."""
        self._opened = _opened(served, options)

    def __enter__(self) -> RunningServer:
        self._server = self._opened.__enter__()
        self.url, self.port = self._server.url, self._server.port
        self._thread = threading.Thread(target=self._server.answer, name="server")
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._opened.__exit__(*error)
