"""Work that may crash or hang, such as starting a driver, done in a process of its own.

However this process ends, the other one ends soon after it: its standard input is a pipe of which
this one holds the other end. Not on Windows, where a library may wait for an input that is being
read.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from json import dumps, loads
from threading import Lock, Thread
from types import TracebackType
from typing import Any

_MARK = "edge-spec answers: "  # libraries may print, too
_MAX_LINE = 200  # characters of each of the two lines that a library printed last


class IsolatedError(Exception):
    """The work failed, crashed or took too long; `str()` is the reason, one line.

    printed: what the process of work that failed had printed on its standard error by then.
    """

    def __init__(self, reason: str, printed: str = "") -> None:
        super().__init__(reason)
        self.printed = printed


class Lifeline:
    """Processes that hold on to it end when it is closed, if this is to be before their work is
    done."""

    def __init__(self) -> None:
        self._ends = () if sys.platform == "win32" else os.pipe()
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = Lock()
        self._ended = False

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Any thread may call it. No process starts afterwards."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            for process in self._processes:
                process.kill()
            for end in self._ends:
                os.close(end)

    def start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Raises IsolatedError after `end`."""
        with self._lock:
            if self._ended:
                raise IsolatedError("it is not wanted any more")
            process = subprocess.Popen(
                command,
                stdin=self._ends[0] if self._ends else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
            self._processes.append(process)
        return process


def isolated(
    work: Callable[..., Any], *arguments: str, timeout_s: float, lifeline: Lifeline | None = None
) -> Any:
    """What `work`, a function of a module, returns, as JSON has it. Raises IsolatedError.

    lifeline: of several calls, whose processes are to end before their work is done.
    """
    with ExitStack() as opened:
        held = lifeline or opened.enter_context(Lifeline())
        out, errors, status = _run(work, arguments, timeout_s, held)
    answers = [line for line in out.splitlines() if line.startswith(_MARK)]
    if not answers:
        raise IsolatedError(_crash(errors, status))
    outcome = loads(answers[-1].removeprefix(_MARK))
    if "reason" in outcome:
        raise IsolatedError(outcome["reason"], errors)
    return outcome["result"]


def _run(
    work: Callable[..., Any], arguments: tuple[str, ...], timeout_s: float, lifeline: Lifeline
) -> tuple[str, str, int]:
    """Its output, its errors and its exit status. Raises IsolatedError where it takes too long."""
    code = (
        f"from {work.__module__} import {work.__qualname__} as work; "
        "from edge_spec.placement.isolated import answer; answer(work)"
    )
    # -P: or a file in the working directory could stand in for a module.
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # which would start a debugger
    with lifeline.start(command, environment) as process:
        try:
            return *process.communicate(timeout=timeout_s), process.returncode
        except subprocess.TimeoutExpired:
            raise IsolatedError(f"there was no answer within {timeout_s:g} s") from None
        finally:
            process.kill()


def answer(work: Callable[..., Any]) -> None:
    """What the other process runs: prints the outcome, after which it may crash as it likes."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    if sys.platform != "win32":
        Thread(target=_end_with_parent, daemon=True).start()
    try:
        outcome = {"result": work(*sys.argv[1:])}
    except Exception as error:
        outcome = {"reason": " ".join(str(error).split()) or type(error).__name__}
    print(f"\n{_MARK}{dumps(outcome)}", flush=True)


def _end_with_parent() -> None:
    with suppress(OSError):  # a library has closed it
        os.read(0, 1)  # nothing comes but the end
        os._exit(1)


def _crash(errors: str, status: int) -> str:
    lines = [" ".join(line.split()) for line in errors.splitlines() if line.strip()]
    last = "; ".join(line[:_MAX_LINE] for line in lines[-2:]) or "it printed nothing"
    how = f"exit status {status}"
    if status < 0:
        how = signal.Signals(-status).name
    return f"the library ended the process ({how}): {last}"
