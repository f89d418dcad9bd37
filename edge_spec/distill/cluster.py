"""Machines that write answers: this one, or a Ray cluster's (Moritz et al. 2018).

Each opens the model once and writes several conversations at a time. Results do not depend on which
machine runs a task, if all compute alike.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from threading import Event
from typing import Any

from edge_spec.core.runtime_protocols import SharesPasses
from edge_spec.diagnostics.report_files import files_sha256
from edge_spec.distill.prompts import Conversation, Tasks
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, EdgeSpecError, SessionError, UsageError
from edge_spec.loader import load_asked
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source

CONVERSATIONS = 8  # per machine at a time
_CONNECT_S = 5.0
_POLL_S = 0.5

Writer = Callable[[int, Event], Conversation | None]  # runs `Tasks.conversation`


@dataclass(frozen=True)
class ThisMachine:
    engine: Engine
    tasks: Tasks

    @contextmanager
    def writers(self) -> Iterator[Sequence[Writer]]:
        """Yield writers that share passes if the runtime supports that; else one."""
        with ExitStack() as opened:
            engines = [self.engine]
            if isinstance(self.engine.parts.model, SharesPasses):
                forks = (self.engine.fork() for _ in range(CONVERSATIONS - 1))
                engines += [opened.enter_context(each) for each in forks]
            yield [partial(self.tasks.conversation, each) for each in engines]


@dataclass(frozen=True)
class _Refused:
    """Another machine's error, in a form that Ray can send."""

    message: str
    remedy: str


class _RemoteMachine:
    """A Ray process on a machine of the cluster."""

    def __init__(self, model: str, asked: AskedOptions, tasks: Tasks) -> None:
        self._model, self._asked, self._tasks = model, asked, tasks
        self._free: Queue[Writer] = Queue()
        self._opened = ExitStack()  # until the process ends

    def run(self, work: str, *given: Any) -> Any:
        """Call the method `work`."""
        try:
            return getattr(self, work)(*given)
        except EdgeSpecError as error:
            return _Refused(error.message, error.remedy)

    def open(self) -> str:
        engine = load_asked(self._model, self._asked, _quiet, keeps_answers=False)
        machine = ThisMachine(engine, self._tasks)
        for writer in self._opened.enter_context(machine.writers()):
            self._free.put(writer)
        return files_sha256(Source(self._model, _quiet).path)

    def write(self, task: int) -> Conversation | None:
        writer = self._free.get()
        try:
            return writer(task, Event())
        finally:
            self._free.put(writer)


class MachineLostError(Exception):
    """A machine was lost; its task is undone."""


@dataclass(eq=False)
class Cluster:
    """A Ray cluster whose machines hold the model open until the block ends. Others take over a
    lost machine's tasks.

    Raises UsageError for an invalid address, DeviceError if nobody answers, if a machine has
    another model or cannot open it, and if all machines are lost.
    """

    address: str
    model: str
    asked: AskedOptions
    tasks: Tasks
    _machines: list[Any] = field(default_factory=list)  # not known to be lost

    def __enter__(self) -> Cluster:
        require_answer(self.address)
        import ray

        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise DeviceError(
                f"cannot join the Ray cluster at {self.address}: {error}",
                remedy="This machine has to be a part of it: ray start --address HOST:PORT.",
            ) from None
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for machine in self._machines:
            with suppress(Exception):  # it is lost
                ray.kill(machine)
        ray.shutdown()

    @contextmanager
    def writers(self) -> Iterator[Sequence[Writer]]:
        count = len(self._machines) * CONVERSATIONS
        yield [partial(self._write, number) for number in range(count)]

    def _write(self, number: int, task: int, stop: Event) -> Conversation | None:
        """Run a task on a machine, again if it is lost; None after a stop. number: spreads work
        evenly."""
        while True:
            machines = tuple(self._machines)
            if not machines:
                raise DeviceError(
                    "all machines of the cluster are gone",
                    remedy="Start them again: the same command goes on with what is finished.",
                )
            machine = machines[number % len(machines)]
            with suppress(MachineLostError):
                found: Conversation | None = self._wait(
                    machine, machine.run.remote("write", task), stop
                )
                return found

    def _open(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        listed: Any = ray.nodes  # Ray does not declare its types
        nodes = [each for each in listed() if each["Alive"] and each["Resources"].get("CPU", 0)]
        made = ray.remote(_RemoteMachine)
        for node in nodes:
            options = made.options(
                num_cpus=0,  # one per machine, whatever else runs there
                max_concurrency=CONVERSATIONS + 1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            self._machines.append(options.remote(self.model, self.asked, self.tasks))
        content = files_sha256(Source(self.model, _quiet).path)
        opening = [(machine, machine.run.remote("open")) for machine in self._machines]
        for node, (machine, found) in zip(nodes, opening, strict=True):
            where = node["NodeManagerAddress"]
            with suppress(MachineLostError):
                if self._wait(machine, found, Event(), f"{where}: ") != content:
                    raise DeviceError(
                        f"{self.model} on {where} is another model than here",
                        remedy="Copy the model to the same path on all machines.",
                    )
        if not self._machines:
            raise DeviceError(
                f"no machine of the Ray cluster at {self.address} can be used",
                remedy="Look at them with: ray status.",
            )

    def _wait(self, machine: Any, task: Any, stop: Event, where: str = "") -> Any:
        """Return None after a stop. Raises MachineLostError, and DeviceError for a refusal."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayError

        try:
            while not ray.wait([task], timeout=_POLL_S)[0]:
                if stop.is_set():
                    return None
            value = ray.get(task)
        except (ObjectLostError, RayActorError) as error:
            with suppress(ValueError):  # another of its tasks noticed first
                self._machines.remove(machine)
            raise MachineLostError from error
        except RayError as error:
            raise SessionError(
                f"a task on the cluster failed: {str(error).strip().splitlines()[-1]}",
                remedy="Leave --ray out, or repair that machine.",
            ) from None
        if isinstance(value, _Refused):
            raise DeviceError(where + value.message, remedy=value.remedy)
        return value


def require_answer(address: str) -> None:
    """Raises UsageError unless the address is HOST:PORT, DeviceError if nobody answers; Ray would
    wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or "/" in host or int(port) > 65535:
        raise UsageError(
            f"--ray {address} is no address", remedy="Give HOST:PORT, as ray start has shown it."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise DeviceError(
            f"nobody answers at {address}: {error}",
            remedy="Start the cluster with ray start --head, and give the address that it shows.",
        ) from None


def _quiet(what: str, fraction: float) -> None:
    """Ignore progress: nobody sees what another machine prints."""


Machine = ThisMachine | Cluster
