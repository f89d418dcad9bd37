"""Work that may crash or hang, such as starting a driver, in a separate process. It ends soon after
ours, however ours ends, because its standard input is our pipe. Not on Windows, where a library may
wait for an input that is being read."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from json import dumps, loads
from queue import Empty, Queue
from threading import Event, Thread
from typing import IO, Any

_MARK = "edge-spec answers: "  # marks the answer, since libraries may print too
_TOLD = "edge-spec has done: "
_TICK_S = 0.05  # within which every system notices an interrupt, and each call its `stop`
_END_S = 10.0  # for a library to shut down after the answer
_EXIT_S = 1.0  # for a process to exit after its last line
_MAX_LINE = 200  # characters of each of a library's last two lines


class IsolatedError(Exception):
    """The work failed, crashed or took too long; `str()` says why, on one line. printed: its
    standard error."""

    def __init__(self, reason: str, printed: str = "") -> None:
        super().__init__(reason)
        self.printed = printed


class NoAnswerError(IsolatedError):
    """The work took too long."""


def isolated(
    work: Callable[..., Any],
    *arguments: str,
    timeout_s: float,
    stop: Event | None = None,
    on_step: Callable[[float], None] | None = None,
) -> Any:
    """Return the result of `work`, a module-level function, decoded from JSON. Raises
    IsolatedError. stop: ends the work once it is set. on_step: receives in this thread what the
    work passes to `tell`; if it raises, the work ends."""
    found, errors, status = _run(work, arguments, timeout_s, stop or Event(), on_step)
    if found is None:
        raise IsolatedError(_crash(errors, status))
    outcome = loads(found)
    if "reason" in outcome:
        raise IsolatedError(outcome["reason"], errors)
    return outcome["result"]


def tell(fraction: float) -> None:
    """Report progress, 0 to 1, from isolated work."""
    print(f"\n{_TOLD}{fraction:.4f}", flush=True)


def _run(
    work: Callable[..., Any],
    arguments: tuple[str, ...],
    timeout_s: float,
    stop: Event,
    on_step: Callable[[float], None] | None,
) -> tuple[str | None, str, int]:
    code = (
        f"from {work.__module__} import {work.__qualname__} as work; "
        "from edge_spec.core.isolated import answer; answer(work)"
    )
    # -P: a file in the working directory must not shadow a module.
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # the backtrace would start a debugger
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if sys.platform == "win32" else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
        lines: Queue[str | None] = Queue()
        Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            found = _answer_in(lines, timeout_s, stop, on_step)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
        finally:
            process.kill()
            status = process.wait()
            if process.stdin is not None:
                process.stdin.close()
        errors.seek(0)
        return found, errors.read().decode(errors="replace"), status


def _read(stream: IO[str], lines: Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _answer_in(
    lines: Queue[str | None],
    timeout_s: float,
    stop: Event,
    on_step: Callable[[float], None] | None,
) -> str | None:
    """None ends the lines. Raises NoAnswerError, and IsolatedError once `stop` is set."""
    end_s = time.monotonic() + timeout_s
    found = None
    while True:
        if stop.is_set():
            raise IsolatedError("it is not wanted any more")
        try:
            line = lines.get(timeout=min(_TICK_S, max(0.0, end_s - time.monotonic())))
        except Empty:
            if time.monotonic() < end_s:
                continue
            if found is None:
                raise NoAnswerError(f"there was no answer within {timeout_s:g} s") from None
            return found
        if line is None:
            return found
        if line.startswith(_MARK):
            found, end_s = line.removeprefix(_MARK), time.monotonic() + _END_S
        elif line.startswith(_TOLD) and on_step is not None:
            on_step(float(line.removeprefix(_TOLD)))


def answer(work: Callable[..., Any]) -> None:
    """Run the work in the other process and print its outcome; it may crash afterwards."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    if sys.platform != "win32":
        Thread(target=_end_with_parent, daemon=True).start()
    try:
        outcome = {"result": work(*sys.argv[1:])}
    except Exception as error:
        outcome = {"reason": reason_of(error)}
    print(f"\n{_MARK}{dumps(outcome)}", flush=True)


def reason_of(error: Exception) -> str:
    """Return an error's message on one line."""
    if isinstance(error, MemoryError):
        return "there was not enough memory"
    return " ".join(str(error).split()) or type(error).__name__


def _end_with_parent() -> None:
    with suppress(OSError):  # a library closed it
        os.read(0, 1)  # returns only at the end of our process
        os._exit(1)


def _crash(errors: str, status: int) -> str:
    lines = [" ".join(line.split()) for line in errors.splitlines() if line.strip()]
    last = "; ".join(line[:_MAX_LINE] for line in lines[-2:]) or "it printed nothing"
    how = f"exit status {status}"
    if status < 0:
        how = signal.Signals(-status).name
    if how == "SIGKILL" and not lines:
        return "the process was killed (SIGKILL), as a system does that runs out of memory"
    return f"the library ended the process ({how}): {last}"
