"""Kills processes that write files, at random moments, and opens what is there then.

    python benchmarks/kills.py [--rounds N] [--json FILE]

Each round a new process writes ever newer versions with the same functions as edge-spec, until it
is killed (SIGKILL) at a moment drawn from twice the time that one version takes. Then the file has
to be the version from before the round or a newer one, whole; anything else is a misload, and so
is a reader's warning. Needs a system that forks.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from common import report
from kill_operations import MisloadError, Operation, operations

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fixtures import fake_hub

TIMED = 3  # versions, for the median


def killed(operation: Operation, version: int, delay_s: float) -> None:
    """Writes this version and newer ones in a process that is killed `delay_s` after it began."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(tell, b".")
            for newer in count(version):
                operation.write(newer)
        finally:
            os._exit(1)  # a write that fails: the parent finds no process to kill
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        raise MisloadError("a write failed")


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of edge-spec's loggers."""
    handler, log = Warnings(), logging.getLogger("edge_spec")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


def misload(operation: Operation, before: int) -> str | None:
    """Says what is wrong with what is there, or None. before: the last version known."""
    with heard() as warnings:
        try:
            found = operation.read()
        except Exception as error:
            return repr(error)
    if warnings:
        return warnings[0]
    if found is None:
        return None if operation.may_vanish else "it has vanished"
    if operation.is_ordered and found < before:
        return f"version {found} is older than {before}"
    return None


def measured(operation: Operation) -> float:
    """Seconds that one version takes, median; TIMED versions are there afterwards."""
    seconds = []
    for version in range(1, TIMED + 1):
        start = time.perf_counter()
        operation.write(version)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def run(rounds: int, seed: int, folder: Path, hub: Any) -> dict[str, Any]:
    randomness = random.Random(seed)
    known = operations(folder, hub)
    hub.offer(1)
    lasting = {name: measured(operation) for name, operation in known.items()}
    by_operation: dict[str, dict[str, int]] = {name: {"kills": 0, "misloads": 0} for name in known}
    versions = {name: operation.read() or 0 for name, operation in known.items()}
    for index in range(rounds):
        name = list(known)[index % len(known)]
        operation, counted = known[name], by_operation[name]
        hub.offer(index + 2)
        try:
            killed(operation, versions[name] + 1, randomness.uniform(0, 2 * lasting[name]))
            wrong = misload(operation, versions[name])
        except MisloadError as error:
            wrong = str(error)
        counted["kills"] += 1
        if wrong is not None:
            counted["misloads"] += 1
            print(f"{name}: {wrong}", file=sys.stderr)
            operation.write(versions[name] + 1)
        versions[name] = operation.read() or versions[name]
    total = {what: sum(each[what] for each in by_operation.values()) for what in counted}
    return {"rounds": rounds, **total, "by_operation": by_operation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as place, fake_hub.running() as hub:
        from huggingface_hub import constants

        os.environ["EDGE_SPEC_CACHE"] = f"{place}/cache"
        constants.HF_HUB_CACHE, constants.ENDPOINT = f"{place}/hub", hub.endpoint
        constants.HF_HUB_OFFLINE = False
        results = run(arguments.rounds, arguments.seed, Path(place), hub)
    print(f"{results['kills']} kills, {results['misloads']} misloads")
    report(results, arguments.json)


if __name__ == "__main__":
    main()
