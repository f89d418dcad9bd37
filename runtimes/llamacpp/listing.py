"""The library's devices as `edge-spec devices` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_spec.placement import devices as placement
from edge_spec.runtimes.llamacpp.library import Library, LibraryDevice
from edge_spec.runtimes.llamacpp.remote import NO_RPC, fault


def listed(runtime: str, library: Library, servers: Sequence[str]) -> Iterator[placement.Device]:
    """Under the names that `choose_devices` takes; a server that does not serve under its own."""
    faults = {
        server: fault(server) if library.takes_servers else f"{library.name}: {NO_RPC}"
        for server in servers
    }
    serving = [server for server, reason in faults.items() if reason is None]
    for device in library.devices(*serving):
        if not device.is_cpu or device.name == "CPU":  # others work for the CPU, unasked
            yield placement.Device(
                runtime,
                device.name.lower(),
                _kind(device),
                device.description,
                device.total_bytes or None,
                device.free_bytes or None,
            )
    for server, reason in faults.items():
        if reason is not None:
            yield placement.Device(runtime, server, placement.REMOTE, "RPC server", fault=reason)


def _kind(device: LibraryDevice) -> str:
    if device.server:
        return placement.REMOTE
    return placement.CPU if device.is_cpu else placement.GPU
