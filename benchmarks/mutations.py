"""Breaks the code in small ways and says which test notices.

    python benchmarks/mutations.py [--only ID,...] [--tests ARGUMENTS] [--out FILE.json]

Applies one breakage of mutations.toml at a time, in place, and runs the tests that are expected to
notice it, slow ones left out. Where these pass, it runs the wider suite: tests/unit and then
tests/integration, or what --tests gives to pytest ("" for nothing, "-m slow tests/unit" for slow
ones); not for what is known as a hole in the tests. Prints a row
of a Markdown table for each, and at the end runs the tests that noticed something on the code as it
is: one that fails there, too, has noticed nothing, and its rows are named.

Runs in the environment of this checkout, whose code the tests have to import. Refuses files that
git does not know as they are, since they are restored in the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
WIDER = ("tests/unit", "tests/integration")
PACKAGES = ("edge_spec", "edge_spec.apps", "edge_spec.exporters", "edge_spec.runtimes")
EXPECTED_S, WIDER_S = 600.0, 3600.0  # most seconds of a run: a breakage may make a loop endless
SURVIVED = "SURVIVED"
# Of pytest's summary; what follows " - " is the reason.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED, _USAGE, _NOTHING = 0, 4, 5  # exit statuses of pytest


@dataclass(frozen=True)
class Mutation:
    """A breakage; `breaks` says what comes of it, `tests` are expected to notice it. hole: no test
    is known that does, so the wider suite is left out."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: list[str]
    hole: bool = False

    @property
    def path(self) -> Path:
        return ROOT / self.file


@dataclass(frozen=True)
class Outcome:
    """Holds what the tests said of one breakage."""

    id: str
    file: str
    breaks: str
    caught_by: str  # a test, or how the process ended; SURVIVED
    expected: bool  # whether it was one of the expected tests
    seconds: float

    @property
    def row(self) -> str:
        caught = self.caught_by if self.caught_by == SURVIVED else f"`{self.caught_by}`"
        wider = "" if self.expected or self.caught_by == SURVIVED else " (wider suite)"
        cells = (self.id, self.breaks, caught + wider, f"{self.seconds:.0f}")
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def read_table(only: Sequence[str]) -> list[Mutation]:
    """Those of the table that were asked for. Ends the program where one of them cannot be applied
    as it stands."""
    with TABLE.open("rb") as file:
        mutations = [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]
    ids = [mutation.id for mutation in mutations]
    faults = [f"two are named {id}" for id in sorted({id for id in ids if ids.count(id) > 1})]
    faults += [f"there is none named {id}" for id in only if id not in ids]
    chosen = [mutation for mutation in mutations if not only or mutation.id in only]
    for mutation in chosen:
        missing = [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).exists()]
        faults += [f"{mutation.id}: there is no {test}" for test in missing]
        text = mutation.path.read_text("utf-8") if mutation.path.is_file() else ""
        if mutation.old == mutation.new or text.count(mutation.old) != 1:
            count = text.count(mutation.old)
            faults.append(f"{mutation.id}: its text stands {count} times in {mutation.file}")
    status = ["git", "status", "--porcelain", "--", *{mutation.file for mutation in chosen}]
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    faults += [f"git knows other content: {line}" for line in changed.splitlines()]
    if faults:
        sys.exit("\n".join(faults))
    return chosen


def require_own_code() -> None:
    """Ends the program where the tests would import another checkout."""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        origin = None if found is None else found.origin
        if origin is None or not Path(origin).resolve().is_relative_to(ROOT):
            sys.exit(f"{package} comes from {origin}: use the .venv of {ROOT}")


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Breaks the code for the length of a block. Its file is as old afterwards as it was before, so
    that what Python has compiled of it is of use again."""
    path, known = mutation.path, mutation.path.stat()
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(mutation.old.encode(), mutation.new.encode()))
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))


def run_tests(arguments: Sequence[str], limit_s: float) -> list[str]:
    """The tests that failed, or how else it ended; empty where all passed. Ends the program where
    pytest does not understand the arguments."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return [f"no end within {limit_s:.0f} s"]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # of its own session: workers go, too
    if process.returncode in (_PASSED, _NOTHING):  # the latter where all of them are slow ones
        return []
    if process.returncode == _USAGE:
        sys.exit(f"pytest cannot run {shlex.join(arguments)}:\n{output[-2000:]}")
    return _FAILED.findall(output) or [f"pytest ended with status {process.returncode}"]


def examine(mutation: Mutation, wider: Sequence[Sequence[str]]) -> Outcome:
    """Runs the expected tests and then, as long as all pass, the wider ones."""
    start = time.monotonic()
    expected, caught = True, []
    with applied(mutation):
        caught = run_tests(["-x", "-n", "0", *mutation.tests], EXPECTED_S)
        for arguments in () if caught or mutation.hole else wider:
            expected = False
            caught = run_tests(arguments, WIDER_S)
            if caught:
                break
    return Outcome(
        mutation.id,
        mutation.file,
        mutation.breaks,
        caught[0] if caught else SURVIVED,
        expected,
        time.monotonic() - start,
    )


def wider_runs(tests: str | None) -> list[list[str]]:
    """Returns the arguments of the runs that follow where the expected tests pass."""
    if tests is not None:
        return [shlex.split(tests)] if tests.strip() else []
    return [["-x", folder] for folder in WIDER]


def fail_anyway(outcomes: Sequence[Outcome]) -> set[str]:
    """The tests among those that noticed something that fail on the unbroken code, too."""
    tests = sorted({each.caught_by for each in outcomes if each.caught_by.startswith("tests/")})
    return set(run_tests(tests, WIDER_S)) if tests else set()


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the program so that the file that is broken is restored."""
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="ids, joined by commas")
    parser.add_argument("--tests", help="arguments of pytest in place of the wider suite")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    require_own_code()
    mutations = read_table([id for id in options.only.split(",") if id])
    wider = wider_runs(options.tests)
    outcomes: list[Outcome] = []
    print("| id | from then on | caught by | s |\n|---|---|---|---:|", flush=True)
    try:
        for mutation in mutations:
            outcomes.append(examine(mutation, wider))
            print(outcomes[-1].row, flush=True)
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    noisy = fail_anyway(outcomes)
    survived = [each.id for each in outcomes if each.caught_by == SURVIVED]
    doubtful = [each.id for each in outcomes if each.caught_by in noisy]
    ended = [each.id for each in outcomes if each.caught_by.startswith("pytest ended")]
    print(f"\n{len(outcomes)} breakages, {len(survived)} survived: {', '.join(survived) or 'none'}")
    if doubtful:
        print(f"Caught by tests that fail on the unbroken code, too: {', '.join(doubtful)}")
    if ended:  # a crash, or somebody else's kill
        print(f"Ended pytest itself, to be looked at: {', '.join(ended)}")
    sys.exit(1 if survived or doubtful or ended else 0)


if __name__ == "__main__":
    main()
