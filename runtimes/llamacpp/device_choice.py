"""Chooses which of the library's devices a model gets, by the names that users type."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.runtimes.llamacpp.library import LibraryDevice


def wanted_devices(options: RuntimeOptions) -> tuple[str, ...]:
    """Returns the names that `choose_devices` takes."""
    return options.providers or (("cpu",) if options.prefers_cpu else ())


def choose_devices(
    wanted: Sequence[str], devices: Sequence[LibraryDevice]
) -> tuple[LibraryDevice, ...]:
    """Those to offload to, for names such as "cuda0", "cuda" (the first), "gpu" (all) or "cpu".

    No name stands for all. Raises UsageError that lists the devices there are.
    """
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
    """A server that was asked for and not chosen would silently do nothing.

    Raises UsageError.
    """
    unused = set(options.rpc_servers) - {device.server for device in devices}
    if unused:
        raise UsageError(
            f"--device {','.join(options.providers)} leaves nothing for --rpc "
            f"{', '.join(sorted(unused))}",
            remedy="Add rpc0 and so on to --device, or leave it out: edge-spec devices lists them.",
        )
