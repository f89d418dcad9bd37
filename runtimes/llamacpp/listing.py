"""The library's devices as `edge-spec devices` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_spec.fitting import devices as placement
from edge_spec.placement.machine import cpu_features
from edge_spec.runtimes.llamacpp.library import Library, LibraryDevice
from edge_spec.runtimes.llamacpp.remote import NO_RPC, fault


def listed(runtime: str, library: Library, servers: Sequence[str]) -> Iterator[placement.Device]:
    """Lists devices under the names that `choose_devices` takes; a server that does not serve is
    listed under its own name."""
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
                hint=_left_out(library) if device.is_cpu else None,
                shares_memory=device.shares_memory,
            )
    for server, reason in faults.items():
        if reason is not None:
            yield placement.Device(runtime, server, placement.REMOTE, "RPC server", fault=reason)


def _left_out(library: Library) -> str | None:
    """Says where the library was built for less than the processor has, as wheels are."""
    has = any(name.startswith(("AVX512", "X86_V4")) for name in cpu_features())
    if not has or b"AVX512 = 1" in library.system_info():
        return None
    return f"this build of {library.name} does without the processor's AVX-512"


def _kind(device: LibraryDevice) -> str:
    if device.server:
        return placement.REMOTE
    return placement.CPU if device.is_cpu else placement.GPU
