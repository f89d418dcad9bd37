"""Devices of the installed runtimes, and memory of models and this machine before loading."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, Protocol, runtime_checkable

from edge_spec.core import entry_points
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes

# of context in use: a cache grows with its text, and few texts fill a long context
PLANNED_TOKENS = 4096
# glibc's, which reuses freed memory last.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_STATM, MEMINFO = Path("/proc/self/statm"), Path("/proc/meminfo")
GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CPU, GPU, NPU, REMOTE = "cpu", "gpu", "npu", "remote"  # remote: what serves there is unknown
_TIMEOUT_S = 60.0  # more than a runtime needs to try a device
_SERVER_TIMEOUT_S = 20.0  # in addition, for each server


@dataclass(frozen=True)
class Memory:
    """Resident bytes of one model with one session.

    weights: with the library's copies; work: buffers for the widest passes; library: code and
    tables, once for all its models; mapped_twice: the part of weights mapped alongside a copy in
    use, dropped under memory pressure; on_devices: in devices' own memory, not in the other
    numbers.
    """

    weights: int
    cache: int
    work: int
    library: int = 0
    mapped_twice: int = 0
    on_devices: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work + self.library


@runtime_checkable
class Sizing(Protocol):
    """A runtime that can forecast its models' memory."""

    def memory(self, source: Any, options: RuntimeOptions, num_tokens: int | None = None) -> Memory:
        """Return what `open` and one session will keep resident; loads nothing. num_tokens: of
        context in use; None: all."""


def context_tokens(limit: int, options: RuntimeOptions, num_tokens: int | None) -> tuple[int, int]:
    """Return the sessions' context for the model's `limit`, and how much of it is in use."""
    length = limit if options.context_length is None else min(options.context_length, limit)
    return length, length if num_tokens is None else min(num_tokens, length)


def resident_bytes() -> int | None:
    """Return this process's resident memory with mapped files; None if unknown."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """Return the available main memory, within a container's limit; None if unknown."""
    free = _meminfo("MemAvailable")
    rooms = [limit - used for limit, used in _limits()]
    return None if free is None else max(0, min([free, *rooms]))


def total_bytes() -> int | None:
    """Return the main memory, or a container's limit; None if unknown."""
    total = _meminfo("MemTotal")
    return None if total is None else min([total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group (version 2) of this process; cached files do not
    count, as memory pressure drops them."""
    lines = GROUP.read_text("utf-8", "replace").splitlines() if GROUP.exists() else []
    for line in lines:
        if not line.startswith("0::"):
            continue
        group = GROUPS / line.removeprefix("0::").lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(GROUPS):
                break
            with suppress(OSError, ValueError, KeyError):  # no limit, or not readable
                limit = int((each / "memory.max").read_text(encoding="ascii"))
                used = int((each / "memory.current").read_text(encoding="ascii"))
                counts = (each / "memory.stat").read_text(encoding="ascii").splitlines()
                stat = dict(line.split() for line in counts)
                yield limit, used - int(stat["active_file"]) - int(stat["inactive_file"])


def _meminfo(name: str) -> int | None:
    if not MEMINFO.exists():
        return None
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def format_bytes(num_bytes: int) -> str:
    """Format as "412 MB", from 10,000 MB on as "12.3 GB" (decimal units)."""
    if num_bytes >= 10_000_000_000:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.0f} MB"


def return_freed() -> None:
    """Return freed memory that the allocator keeps to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


@dataclass(frozen=True)
class Device:
    """A place where a runtime can run a model; without a name, why the runtime cannot run. name:
    for `--device`. shares_memory: uses main memory, as integrated GPUs do."""

    runtime: str
    name: str | None
    kind: str | None
    description: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    fault: str | None = None  # why it cannot be used, on one line
    shares_memory: bool = False
    kernels: str | None = None  # those replacing the library's own, or why none do, on one line


@runtime_checkable
class DeviceListing(Protocol):
    """A runtime that can list its devices."""

    def devices(self, options: RuntimeOptions) -> Sequence[Device]:
        """Return all devices within reach, broken ones with their fault. Loads no model, ignores
        irrelevant `options`. Raises MissingDependencyError."""


_NPUS = ("npu", "qnn", "ane")  # a machine has at most one


def share_chip(one: Iterable[str], other: Iterable[str]) -> bool:
    """Return whether models on these devices share a chip. "gpu" may be any GPU; otherwise each
    interface numbers GPUs its own way, so two interfaces count as two chips."""
    pairs = product(map(_chip, one), map(_chip, other))
    return any(a == b or (GPU in (a[0], b[0]) and not {a[0], b[0]} & {CPU, NPU}) for a, b in pairs)


def _chip(name: str) -> tuple[str, int]:
    """Return kind and number: "cpu", "npu", "gpu", or a GPU's interface, such as "cuda"."""
    name = name.lower()
    base = name.rstrip("0123456789")
    kind = base.removesuffix(":")
    return (NPU, 0) if kind in _NPUS else (kind, int(name[len(base) :] or 0))


def processor(runtime: str) -> Device:
    """The CPU, for a runtime whose library does not describe it."""
    return Device(runtime, "cpu", CPU, "the processor", total_bytes(), free_bytes())


def list_devices(rpc_servers: Sequence[str] = ()) -> list[Device]:
    """List all runtimes' devices, by name of the runtime, including missing libraries. Each is
    asked in a separate process, so a driver that crashes or hangs is an entry with a fault."""
    runtimes = entry_points.names("runtimes")
    stop = Event()
    with ThreadPoolExecutor() as pool:
        try:
            found = pool.map(lambda runtime: _listed(runtime, rpc_servers, stop), runtimes)
            return [device for devices in found for device in devices]
        finally:
            stop.set()  # an interrupt does not wait for the processes


def _listed(runtime: str, rpc_servers: Sequence[str], stop: Event) -> list[Device]:
    timeout_s = _TIMEOUT_S + _SERVER_TIMEOUT_S * len(rpc_servers)
    try:
        found = isolated(devices_of, runtime, *rpc_servers, timeout_s=timeout_s, stop=stop)
    except IsolatedError as error:
        return [Device(runtime, None, None, "", fault=str(error))]
    return [Device(**device) for device in found]


def devices_of(runtime: str, *rpc_servers: str) -> list[dict[str, Any]]:
    """List a runtime's devices in this process, as JSON. Raises EdgeSpecError, and whatever a
    library raises."""
    loaded = runtimes.load_runtime(runtime)
    if not isinstance(loaded, DeviceListing):
        fault = "it does not list its devices"
        return [asdict(Device(runtime, None, None, "", fault=fault))]
    found = loaded.devices(RuntimeOptions(rpc_servers=rpc_servers))
    return [asdict(device) for device in found]
