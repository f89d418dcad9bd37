"""Writes answers and reads features as tasks on the machines of a Ray cluster (Moritz et al. 2018).

Each machine opens the model once and writes several conversations at a time. What a task gives does
not depend on where it is done, so the result is that of one machine, where the machines compute
alike. A machine that is lost loses its tasks to the others.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from threading import Event
from typing import Any

import numpy as np

from edge_spec.diagnostics.doctor.report import files_sha256
from edge_spec.distill.answers import CONVERSATIONS, Writer, WriterLostError, local_writers
from edge_spec.distill.features import FeatureRequest, feature_rows
from edge_spec.distill.prompts import Conversation, Tasks
from edge_spec.errors import DeviceError, EdgeSpecError, SessionError, UsageError
from edge_spec.loader import load_asked
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source

_CONNECT_S = 5.0
_POLL_S = 0.5
_CONVERSATIONS_A_TASK = 8  # whose features are computed by one task


@dataclass(frozen=True)
class _Refused:
    """Carries an error of another machine: Ray cannot send it as it is."""

    message: str
    remedy: str


class _Machine:
    """One machine of the cluster, with the model open. Lives in a process of Ray there."""

    def __init__(self, model: str, asked: AskedOptions, tasks: Tasks) -> None:
        self._model, self._asked, self._tasks = model, asked, tasks
        self._free: Queue[Writer] = Queue()
        self._opened = ExitStack()  # until the process ends

    def run(self, work: str, *given: Any) -> Any:
        """Returns what the method `work` does, or its refusal."""
        try:
            return getattr(self, work)(*given)
        except EdgeSpecError as error:
            return _Refused(error.message, error.remedy)

    def open(self) -> str:
        self._engine = load_asked(self._model, self._asked, _quiet, keeps_answers=False)
        for writer in self._opened.enter_context(local_writers(self._engine, self._tasks)):
            self._free.put(writer)
        return files_sha256(Source(self._model, _quiet))

    def write(self, task: int) -> Conversation | None:
        writer = self._free.get()
        try:
            return writer(task, Event())
        finally:
            self._free.put(writer)

    def features(
        self, conversations: Sequence[Conversation], request: FeatureRequest
    ) -> list[np.ndarray]:
        return list(feature_rows(self._engine.parts.model, conversations, request))


@dataclass(eq=False)
class Cluster:
    """Connects to a cluster, opens the model on all of its machines, and lets go of them in the
    end.

    Raises UsageError for what is no address, DeviceError where nobody answers there, where a
    machine cannot open the model or has another one, and where all machines are lost.
    """

    address: str
    model: str
    asked: AskedOptions
    tasks: Tasks
    _machines: list[Any] = field(default_factory=list)  # that are not known to be lost

    def __enter__(self) -> Cluster:
        require_answer(self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
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
        yield [partial(self._write, each) for each in self._machines for _ in range(CONVERSATIONS)]

    def feature_rows(
        self, conversations: Sequence[Conversation], request: FeatureRequest
    ) -> Generator[np.ndarray]:
        """Reads as `features.feature_rows` does."""
        size = _CONVERSATIONS_A_TASK
        parts = [list(conversations[at : at + size]) for at in range(0, len(conversations), size)]
        begun: list[tuple[Any, Any]] = []
        for index, part in enumerate(parts):
            while len(begun) < min(index + max(1, 2 * len(self._machines)), len(parts)):
                begun.append(self._begin(len(begun), parts[len(begun)], request))
            while True:
                machine, found = begun[index]
                try:
                    yield from self._got(machine, found, Event())
                    break
                except WriterLostError:
                    begun[index] = self._begin(index, part, request)
            begun[index] = (None, None)  # Ray may forget what was read

    def _begin(self, index: int, part: list[Conversation], request: FeatureRequest) -> Any:
        """Returns the machine that was given the part, and what Ray will have its features as."""
        if not self._machines:
            raise DeviceError(
                "all machines that read features are gone",
                remedy="Start them again: the same command goes on with what is read.",
            )
        machine = self._machines[index % len(self._machines)]
        return machine, machine.run.remote("features", part, request)

    def _write(self, machine: Any, task: int, stop: Event) -> Conversation | None:
        found: Conversation | None = self._got(machine, machine.run.remote("write", task), stop)
        return found

    def _open(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        listed: Any = ray.nodes  # Ray states no types of it
        nodes = [each for each in listed() if each["Alive"] and each["Resources"].get("CPU", 0)]
        made = ray.remote(_Machine)
        for node in nodes:
            options = made.options(
                num_cpus=0,  # one on each machine, whatever else runs there
                max_concurrency=CONVERSATIONS + 1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            self._machines.append(options.remote(self.model, self.asked, self.tasks))
        content = files_sha256(Source(self.model, _quiet))
        opening = [(machine, machine.run.remote("open")) for machine in self._machines]
        for node, (machine, found) in zip(nodes, opening, strict=True):
            with suppress(WriterLostError):
                where = node["NodeManagerAddress"]
                if self._got(machine, found, Event(), where=f"{where}: ") != content:
                    raise DeviceError(
                        f"{self.model} on {where} is another model than here",
                        remedy="Copy the model to the same path on all machines.",
                    )
        if not self._machines:
            raise DeviceError(
                f"no machine of the Ray cluster at {self.address} can be used",
                remedy="Look at them with: ray status.",
            )

    def _got(self, machine: Any, found: Any, stop: Event, where: str = "") -> Any:
        """Returns what a task has given; None after a stop. Raises WriterLostError where its
        machine is lost, and DeviceError for what it refused."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayError

        try:
            while not ray.wait([found], timeout=_POLL_S)[0]:
                if stop.is_set():
                    return None
            value = ray.get(found)
        except (ObjectLostError, RayActorError) as error:
            with suppress(ValueError):  # another of its tasks was first
                self._machines.remove(machine)
            raise WriterLostError from error
        except RayError as error:
            raise SessionError(
                f"a task on the cluster failed: {str(error).strip().splitlines()[-1]}",
                remedy="Leave --ray out, or repair that machine.",
            ) from None
        if isinstance(value, _Refused):
            raise DeviceError(where + value.message, remedy=value.remedy)
        return value


def require_answer(address: str) -> None:
    """Raises UsageError for what is no HOST:PORT, DeviceError where nobody answers: Ray would wait
    for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host or int(port) > 65535:
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
    """Tells nobody: what is printed elsewhere is not seen."""
