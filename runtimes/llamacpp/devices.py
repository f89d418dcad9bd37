"""Lists and chooses local devices and those of RPC servers.

The library exits if an RPC server refuses it or has another version, and waits forever for a busy
one. So each server is first tried in an isolated process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from edge_spec.core.endpoint import Endpoint
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, UsageError
from edge_spec.models import devices as placement
from edge_spec.runtimes.llamacpp import upstream
from edge_spec.runtimes.llamacpp.library import NAME, Library, LibraryDevice

NO_RPC = "it was compiled without RPC"
_CONNECT_S, _FREE_S = 3.0, 3.0
_ANSWER_S = 10.0  # includes starting a process


def remote_devices(library: Library, servers: Sequence[str]) -> list[LibraryDevice]:
    """Return the servers' devices. Raises UsageError without RPC support, DeviceError if a server
    does not serve, both quickly."""
    if not servers:
        return []
    if not library.llama_supports_rpc():
        raise UsageError(
            f"{NAME} cannot reach {', '.join(servers)}: {NO_RPC}",
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
    """Return in one line why a server cannot be used, or None."""
    endpoint = Endpoint.parse(server)
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S)
    except OSError as error:
        return f"no connection: {error}"
    with connection:
        # A free server closes a connection without requests at once. A busy one would reach a
        # request only after the client has gone, which ends its process.
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
    return len(upstream.library().devices(server))


def listed(runtime: str, library: Library, servers: Sequence[str]) -> Iterator[placement.Device]:
    """List devices as `choose_devices` names them, unusable servers by address."""
    faults = {
        server: fault(server) if library.llama_supports_rpc() else f"{NAME}: {NO_RPC}"
        for server in servers
    }
    serving = [server for server, reason in faults.items() if reason is None]
    for device in library.devices(*serving):
        if not device.is_cpu or device.name == "CPU":  # others assist the CPU unasked
            yield placement.Device(
                runtime,
                device.name.lower(),
                _kind(device),
                device.description,
                device.total_bytes or None,
                device.free_bytes or None,
                shares_memory=device.shares_memory,
                kernels=library.rows.description if device.is_cpu else None,
            )
    for server, reason in faults.items():
        if reason is not None:
            yield placement.Device(runtime, server, placement.REMOTE, "RPC server", fault=reason)


def _kind(device: LibraryDevice) -> str:
    if device.server:
        return placement.REMOTE
    return placement.CPU if device.is_cpu else placement.GPU


def wanted_devices(options: RuntimeOptions) -> tuple[str, ...]:
    return options.providers or (("cpu",) if options.prefers_cpu else ())


def choose_devices(
    wanted: Sequence[str], devices: Sequence[LibraryDevice]
) -> tuple[LibraryDevice, ...]:
    """Return the devices named "cuda0", "cuda" (the first), "gpu" (all) or "cpu"; no names: all.
    Raises UsageError that lists the devices."""
    others = [device for device in devices if not device.is_cpu]
    chosen: list[LibraryDevice] = []
    for name in map(str.lower, wanted or ["gpu"] if others or wanted else []):
        if name == "gpu" and others:
            found = others
        elif name == "cpu":
            found = []
        else:
            exact = [device for device in others if device.name.lower() == name]
            found = exact or [d for d in others if d.name.lower().rstrip("0123456789") == name][:1]
            if not found:
                there = ", ".join(f"{d.name.lower()} ({d.description})" for d in devices)
                raise UsageError(f"there is no device {name!r}", remedy=f"There are: {there}.")
        chosen += [device for device in found if device not in chosen]
    return tuple(chosen)


def require_used(options: RuntimeOptions, devices: Sequence[LibraryDevice]) -> None:
    """Raises UsageError if a requested server is unused."""
    unused = set(options.rpc_servers) - {device.server for device in devices}
    if unused:
        raise UsageError(
            f"--device {','.join(options.providers)} leaves nothing for --rpc "
            f"{', '.join(sorted(unused))}",
            remedy="Add rpc0 and so on to --device, or leave it out: edge-spec devices lists them.",
        )
