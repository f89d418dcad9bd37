"""Servers of llama.cpp's RPC backend, whose devices a model can be spread over.

The library ends the process where a server refuses it or speaks another version, and waits for
ever for one that serves another client: each is tried before, in a process of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from edge_spec.core.endpoint import Endpoint
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.errors import DeviceError, UsageError
from edge_spec.runtimes.llamacpp import upstream
from edge_spec.runtimes.llamacpp.library import Library, LibraryDevice

NO_RPC = "it was compiled without RPC"
_CONNECT_S, _FREE_S = 3.0, 3.0
_ANSWER_S = 10.0  # with the start of a process


def remote_devices(library: Library, servers: Sequence[str]) -> list[LibraryDevice]:
    """Raises UsageError where the library knows no servers, DeviceError where one does not serve,
    both quickly."""
    if not servers:
        return []
    if not library.takes_servers:
        raise UsageError(
            f"{library.name} cannot reach {', '.join(servers)}: {NO_RPC}",
            remedy="Run: CMAKE_ARGS=-DGGML_RPC=ON pip install --force-reinstall --no-cache-dir "
            "--no-deps llama-cpp-python, and use --runtime llamacpp.",
        )
    for server in servers:
        reason = fault(server)
        if reason is not None:
            raise DeviceError(
                f"the RPC server {server} cannot be used: {reason}",
                remedy="Start ggml-rpc-server there, of the same llama.cpp, or leave --rpc out.",
            )
    return [device for device in library.devices(*servers) if device.server]


def fault(server: str) -> str | None:
    """Why a server cannot be used, in one line; None where it can."""
    endpoint = Endpoint.parse(server)
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S)
    except OSError as error:
        return f"no connection: {error}"
    with connection:
        # A server that is free ends a connection without requests at once. One that is busy would
        # get to a request when nobody waits for the answer any more, which ends its process.
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_FREE_S)
        try:
            connection.recv(1)
        except OSError:
            return "it serves another client, one at a time, or is no RPC server"
    try:
        isolated(_greet, server, timeout_s=_ANSWER_S)
    except IsolatedError as error:
        return str(error)
    return None


def _greet(server: str) -> int:
    """The number of its devices."""
    return len(upstream.library().devices(server))
