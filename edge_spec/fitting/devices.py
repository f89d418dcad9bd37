"""Every device that the installed runtimes can put a model on, and where a library means to run
each operation of a model (`edge-spec devices --model`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from edge_spec.core import entry_points
from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.fitting.memory import free_bytes, total_bytes
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle

CPU, GPU, NPU, REMOTE = "cpu", "gpu", "npu", "remote"  # remote: who serves there is not known
_TIMEOUT_S = 60.0  # more than a runtime takes to try a device
_SERVER_TIMEOUT_S = 20.0  # more for each

UNKNOWN = "unknown"  # a device that the library does not tell


@dataclass(frozen=True)
class Device:
    """A place where a runtime can run a model; or, without a name, why the runtime itself cannot.

    name: what `--device` takes; None for `kind` and sizes: not known. shares_memory: its memory is
    the processor's, as that of integrated GPUs.
    """

    runtime: str
    name: str | None
    kind: str | None  # CPU, GPU, NPU or REMOTE
    description: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    fault: str | None = None  # why it cannot be used, in one line
    hint: str | None = None  # what would make it faster, in one line
    shares_memory: bool = False
    kernels: str | None = None  # in place of the library's own, or why not, in one line


@runtime_checkable
class DeviceListing(Protocol):
    """A runtime that knows its devices."""

    def devices(self, options: RuntimeOptions) -> Sequence[Device]:
        """All it can reach, those that do not work with their fault; no model is loaded.

        What it has no use for in `options` is ignored. Raises MissingDependencyError.
        """


def processor(runtime: str) -> Device:
    """The CPU, of a runtime that asks no library for its description."""
    return Device(runtime, "cpu", CPU, "the processor", total_bytes(), free_bytes())


def list_devices(rpc_servers: Sequence[str] = ()) -> list[Device]:
    """Lists the devices of every runtime, in the order of their names, those with a missing library
    included.

    Each is asked in a process of its own, so that a driver that crashes or hangs is an entry with
    a fault.
    """
    runtimes = entry_points.names("runtimes")
    # Closed in this order: an interrupt does not wait for the processes.
    with ThreadPoolExecutor() as pool, Lifeline() as lifeline:
        found = pool.map(lambda runtime: _listed(runtime, rpc_servers, lifeline), runtimes)
        return [device for devices in found for device in devices]


def _listed(runtime: str, rpc_servers: Sequence[str], lifeline: Lifeline) -> list[Device]:
    timeout_s = _TIMEOUT_S + _SERVER_TIMEOUT_S * len(rpc_servers)
    try:
        found = isolated(devices_of, runtime, *rpc_servers, timeout_s=timeout_s, lifeline=lifeline)
    except IsolatedError as error:
        return [Device(runtime, None, None, "", fault=str(error))]
    return [Device(**device) for device in found]


def devices_of(runtime: str, *rpc_servers: str) -> list[dict[str, Any]]:
    """Lists the devices in this process, as JSON has them. Raises EdgeSpecError, and whatever a
    library raises."""
    loaded = runtimes.load_runtime(runtime)
    if not isinstance(loaded, DeviceListing):
        fault = "it does not list its devices"
        return [asdict(Device(runtime, None, None, "", fault=fault))]
    found = loaded.devices(RuntimeOptions(rpc_servers=rpc_servers))
    return [asdict(device) for device in found]


@dataclass(frozen=True)
class FunctionPlacement:
    """Counts the operations of one function of a model, constants left out; largest first.

    shares: of the estimated cost, which add up to 1; empty where the library tells no costs.
    fallbacks: operations by their kind that the device which was asked for cannot run.
    """

    function: str
    operations: Mapping[str, int]  # by device
    shares: Mapping[str, float]  # by device
    fallbacks: Mapping[str, int]


@runtime_checkable
class Placing(Protocol):
    """A runtime that knows where operations of its models will run."""

    def placements(self, source: Any, options: RuntimeOptions) -> Sequence[FunctionPlacement]:
        """source, options: what `open` takes. Raises DeviceError where the library cannot tell."""


def placements_of(bundle: Bundle) -> Sequence[FunctionPlacement]:
    """Asks the first installed runtime that reads the bundle and can tell. Raises UsageError where
    there is none."""
    format = bundle.manifest.format
    for name in entry_points.names("runtimes"):
        try:
            runtime = runtimes.load_runtime(name)
        except MissingDependencyError:
            continue
        if format in runtimes.formats_of(runtime) and isinstance(runtime, Placing):
            return runtime.placements(bundle, RuntimeOptions())
    raise UsageError(
        f"no runtime tells where operations of {bundle.path} run, a bundle of format {format}",
        remedy="Core ML does: give a bundle that was exported with --format coreml.",
    )
